"""Loader of llm-d's `EndpointPickerConfig` files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from prfaas.errors import ConfigError
from prfaas.scheduler.endpoint_picker.parameters import (
    IGNORED,
    DisaggHandler,
    MaxScore,
    NoParameters,
    PdHandler,
    PrefixDecider,
    read,
)
from prfaas.scheduler.endpoint_picker.picker import Decider, EndpointPicker, SchedulingProfile
from prfaas.scheduler.endpoint_picker.plugins import FILTERS, SCORERS

_API_VERSIONS = ("llm-d.ai/v1alpha1", "llm-d.ai/v1", "inference.networking.x-k8s.io/v1alpha1")
_GATES = {
    "flowControl": "requests queue, and are refused, at the router (admission, quotas)",
    "haPopulateNonLeaderDatastore": "every manager knows all instances",
    "prepareDataPlugins": "llm-d has removed it",
    "dataLayer": "llm-d has removed it",
}
_PICKERS = {"max-score-picker": MaxScore}
_DECIDERS = {"prefix-based-pd-decider": PrefixDecider, "always-disagg-pd-decider": NoParameters}
_HANDLERS = {
    "pd-profile-handler": PdHandler,
    "disagg-profile-handler": DisaggHandler,
    "single-profile-handler": NoParameters,
}
# prfaas does the work of these plugins itself: prefix index, token counts, engine figures, routing headers.
_BUILT_IN = (
    "prefill-header-handler",
    "disagg-headers-handler",
    "approx-prefix-cache-producer",
    "precise-prefix-cache-producer",
    "inflight-load-producer",
    "tokenizer",
    "token-producer",
    "endpoint-notification-source",
    "metrics-data-source",
    "core-metrics-extractor",
)
_PARAMETERS: dict[str, type[Any]] = {name: cls for name, (cls, _) in (FILTERS | SCORERS).items()}
_PARAMETERS |= _PICKERS | _DECIDERS | _HANDLERS
# Valid parameters that change nothing, besides those that are not even read (`parameters.IGNORED`).
_NO_EFFECT: dict[str, tuple[str, ...]] = {
    "max-score-picker": ("maxNumOfEndpoints",),
    "pd-profile-handler": ("primaryPort",),
    "disagg-profile-handler": ("primaryPort",),
}


@dataclass(frozen=True)
class _Plugin:
    name: str
    kind: str
    parameters: Any


@lru_cache(maxsize=8)  # A snapshot carries the text, so that it can be replayed alone.
def load(text: str, *, name: str) -> EndpointPicker:
    """Return the picker that a YAML text describes. Messages use `name` for the file.

    Raises:
        ConfigError: the text is not a valid EndpointPickerConfig; the message names the key.
    """
    try:
        return _read_picker(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    except (TypeError, AttributeError) as error:  # A list or number in place of a record, or the reverse.
        raise ConfigError(f"{name}: a field has another shape than in an EndpointPickerConfig: {error}") from error


def _read_picker(fields: Any) -> EndpointPicker:
    if not isinstance(fields, Mapping) or fields.get("kind") != "EndpointPickerConfig":
        raise ValueError("kind: EndpointPickerConfig is expected")
    unknown = set(fields) - {"apiVersion", "kind", "featureGates", "plugins", "schedulingProfiles", "dataLayer"}
    if unknown:
        raise ValueError(f"{sorted(map(str, unknown))[0]}: unknown key")
    if fields.get("apiVersion") not in _API_VERSIONS:
        raise ValueError(f"apiVersion: one of {', '.join(_API_VERSIONS)}")
    warnings = _gate_warnings(fields.get("featureGates") or [])
    plugins = _read_plugins(fields.get("plugins") or [])
    warnings += _plugin_warnings(fields.get("plugins") or [])
    warnings += _data_layer_warnings(fields.get("dataLayer"), plugins)
    profiles = _read_profiles(fields.get("schedulingProfiles"), plugins)
    handler = _find_handler(plugins, profiles)
    if isinstance(handler.parameters, NoParameters):
        return EndpointPicker(profiles, next(iter(profiles)), None, None, warnings)
    decode, prefill, decider_name = _stages(handler.parameters, profiles)
    decider = _find_decider(decider_name, plugins)
    return EndpointPicker(profiles, decode, prefill, decider, warnings)


def _gate_warnings(given: Sequence[Any]) -> tuple[str, ...]:
    """Return warnings for the enabled gates, none of which has an effect."""
    warnings = []
    for gate in given:
        name, _, value = str(gate).partition("=")
        if name not in _GATES:
            raise ValueError(f"featureGates: {name} is unknown")
        if value != "false":
            warnings.append(f"featureGates: {name} changes nothing: {_GATES[name]}")
    return tuple(warnings)


def _read_plugins(given: Sequence[Any]) -> dict[str, _Plugin]:
    plugins: dict[str, _Plugin] = {}
    for item in given:
        if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
            raise ValueError("plugins: each has a type")
        kind, name = item["type"], item.get("name") or item["type"]
        if name in plugins:
            raise ValueError(f"plugins: {name} appears twice")
        try:
            plugins[name] = _Plugin(name, kind, _read_parameters(kind, item.get("parameters")))
        except ValueError as error:
            raise ValueError(f"plugins: {name}: {error}") from error
    return plugins


def _read_parameters(kind: str, given: Any) -> Any:
    if kind in _BUILT_IN:
        return None
    if kind not in _PARAMETERS:
        raise ValueError(f"type {kind} is unknown; known: {', '.join(sorted(_PARAMETERS))}")
    return read(kind, _PARAMETERS[kind], given)


def _plugin_warnings(given: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return warnings for plugins and parameters without an effect."""
    warnings = []
    for item in given:
        kind, parameters = item["type"], item.get("parameters") or {}
        where = f"plugins: {item.get('name') or kind}"
        if kind == "lora-affinity-scorer":
            warnings.append(f"{where}: loaded adapters are not known, so all endpoints score alike")
        if kind in _BUILT_IN and parameters:
            warnings.append(f"{where}: its parameters change nothing: prfaas does its work itself")
        idle = IGNORED.get(kind, ()) + _NO_EFFECT.get(kind, ())
        warnings += [f"{where}: {name} changes nothing in prfaas" for name in parameters if name in idle]
        if parameters.get("ttftSource") == "latencyPredictor":
            warnings.append(f"{where}: ttftSource: there is no latency predictor, so no endpoint counts as slow")
    return tuple(warnings)


def _data_layer_warnings(given: Any, plugins: Mapping[str, _Plugin]) -> tuple[str, ...]:
    """Return a warning for a data layer, because prfaas collects the same figures itself."""
    if given is None:
        return ()
    unknown = set(given) - {"injectDefaults", "sources"}
    if unknown:
        raise ValueError(f"dataLayer: {sorted(map(str, unknown))[0]} is not offered")
    for source in given.get("sources") or []:
        for item in (source, *(source.get("extractors") or [])):
            if item.get("pluginRef") not in plugins:
                raise ValueError(f"dataLayer: pluginRef {item.get('pluginRef')!r} names no plugin")
    return ("dataLayer changes nothing: agents report the load and the caches of their engines",)


def _read_profiles(given: Any, plugins: Mapping[str, _Plugin]) -> dict[str, SchedulingProfile]:
    """Return the profiles. Without any, return one profile of all filters and scorers."""
    if not given:
        used = [(plugin, 1.0) for plugin in plugins.values() if plugin.kind in (*FILTERS, *SCORERS, *_PICKERS)]
        return {"default": _make_profile("default", used)}
    profiles: dict[str, SchedulingProfile] = {}
    for item in given:
        name = item.get("name")
        if not name:
            raise ValueError("schedulingProfiles: each has a name")
        if name in profiles:
            raise ValueError(f"schedulingProfiles: {name} appears twice")
        used = [_referenced_plugin(reference, plugins, name) for reference in item.get("plugins") or []]
        profiles[name] = _make_profile(name, used)
    return profiles


def _referenced_plugin(item: Mapping[str, Any], plugins: Mapping[str, _Plugin], profile: str) -> tuple[_Plugin, float]:
    reference = item.get("pluginRef")
    if not reference or reference not in plugins:
        raise ValueError(f"schedulingProfiles: {profile}: pluginRef {reference!r} names no plugin")
    return plugins[reference], float(item.get("weight", 1.0))


def _make_profile(name: str, used: Sequence[tuple[_Plugin, float]]) -> SchedulingProfile:
    pickers = [plugin for plugin, _ in used if plugin.kind in _PICKERS]
    if len(pickers) > 1:
        raise ValueError(f"schedulingProfiles: {name}: two pickers")
    for plugin, _ in used:
        if plugin.kind not in (*FILTERS, *SCORERS, *_PICKERS):
            raise ValueError(f"schedulingProfiles: {name}: {plugin.name} is no filter, scorer or picker")
    filters = tuple((FILTERS[plugin.kind][1], plugin.parameters) for plugin, _ in used if plugin.kind in FILTERS)
    scorers = tuple(
        (SCORERS[plugin.kind][1], plugin.parameters, weight) for plugin, weight in used if plugin.kind in SCORERS
    )
    return SchedulingProfile(name, filters, scorers, pickers[0].parameters.maxNumOfEndpoints if pickers else 1)


def _find_handler(plugins: Mapping[str, _Plugin], profiles: Mapping[str, SchedulingProfile]) -> _Plugin:
    """Return the only profile handler. A single profile needs none."""
    handlers = [plugin for plugin in plugins.values() if plugin.kind in _HANDLERS]
    if len(handlers) > 1:
        raise ValueError("plugins: two profile handlers")
    if not handlers and len(profiles) > 1:
        raise ValueError("plugins: several profiles need a profile handler")
    if handlers and isinstance(handlers[0].parameters, NoParameters) and len(profiles) > 1:
        raise ValueError("plugins: single-profile-handler takes one profile")
    return handlers[0] if handlers else _Plugin("single-profile-handler", "single-profile-handler", NoParameters())


def _stages(
    handler: PdHandler | DisaggHandler, profiles: Mapping[str, SchedulingProfile]
) -> tuple[str, str | None, str]:
    """Return the decode profile, the prefill profile (None if there is none), and the decider's name."""
    nested = handler if isinstance(handler, DisaggHandler) else DisaggHandler()
    decode = nested.profiles.get("decode", handler.decodeProfile)
    prefill = nested.profiles.get("prefill", handler.prefillProfile)
    if decode not in profiles:
        raise ValueError(f"schedulingProfiles: the decode profile {decode!r} is missing")
    decider_name = nested.deciders.get("prefill", handler.deciderPluginName)
    return decode, prefill if prefill in profiles else None, decider_name


def _find_decider(name: str, plugins: Mapping[str, _Plugin]) -> Decider:
    """Return the decider of that name. llm-d's default is prefix-based."""
    if not name:
        return Decider(PrefixDecider())
    plugin = plugins.get(name)
    if plugin is None or plugin.kind not in _DECIDERS:
        raise ValueError(f"deciderPluginName: {name!r} names no decider")
    return Decider(plugin.parameters if isinstance(plugin.parameters, PrefixDecider) else None)
