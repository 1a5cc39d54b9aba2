"""Loader of llm-d's `EndpointPickerConfig` files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct

from prfaas.errors import ConfigError
from prfaas.scheduler.endpoint_picker.parameters import (
    IGNORED,
    DisaggHandler,
    MaxScore,
    NoParameters,
    PdHandler,
    PrefixDecider,
    Text,
    read,
)
from prfaas.scheduler.endpoint_picker.picker import Decider, EndpointPicker, SchedulingProfile
from prfaas.scheduler.endpoint_picker.plugins import FILTERS, SCORERS

_GATES = {
    "flowControl": "requests queue, and are refused, at the router (admission)",
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


DEFAULT_WEIGHT = 1.0
# llm-d's profile for an empty file.
_DEFAULT_SCORERS = {"queue-scorer": 2.0, "kv-cache-utilization-scorer": 2.0, "prefix-cache-scorer": 3.0}
_TRUE, _FALSE = ("1", "t", "true"), ("0", "f", "false")


class _Shape(Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a file."""


class _PluginSpec(_Shape, frozen=True):
    type: str
    name: str | None = None
    parameters: Any = None

    @property
    def label(self) -> str:
        return self.name or self.type


class _Reference(_Shape, frozen=True):
    pluginRef: str
    weight: float | None = None


class _ProfileSpec(_Shape, frozen=True):
    name: Text
    plugins: list[_Reference] | None = None


class _Extractor(_Shape, frozen=True):
    pluginRef: str


class _Source(_Extractor, frozen=True):
    extractors: list[_Extractor] | None = None


class _DataLayer(_Shape, frozen=True):
    injectDefaults: bool | None = None
    sources: list[_Source] | None = None


class _File(_Shape, frozen=True):
    kind: Literal["EndpointPickerConfig"]
    apiVersion: Literal["llm-d.ai/v1alpha1", "llm-d.ai/v1", "inference.networking.x-k8s.io/v1alpha1"]
    featureGates: list[str] | None = None
    plugins: list[_PluginSpec] | None = None
    schedulingProfiles: list[_ProfileSpec] | None = None
    dataLayer: _DataLayer | None = None


@dataclass(frozen=True)
class _Plugin:
    name: str
    kind: str
    parameters: Any


@lru_cache(maxsize=8)  # A snapshot carries the text, so that it can be replayed alone.
def load(text: str, *, name: str) -> EndpointPicker:
    """Return the picker that a YAML text describes; llm-d's default for an empty text. Messages use `name` for the file.

    Raises:
        ConfigError: the text is not a valid EndpointPickerConfig; the message names the key.
    """
    if not text.strip():
        return _make_picker(_default_file())
    try:
        return _make_picker(msgspec.convert(yaml.safe_load(text), _File))
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: not an EndpointPickerConfig: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _default_file() -> _File:
    plugins = [_PluginSpec(kind) for kind in _DEFAULT_SCORERS]
    references = [_Reference(kind, weight) for kind, weight in _DEFAULT_SCORERS.items()]
    profiles = [_ProfileSpec("default", references)]
    return _File("EndpointPickerConfig", "llm-d.ai/v1alpha1", plugins=plugins, schedulingProfiles=profiles)


def _make_picker(file: _File) -> EndpointPicker:
    specs = file.plugins or []
    plugins = _read_plugins(specs)
    warnings = (
        *_gate_warnings(file.featureGates or []),
        *_plugin_warnings(specs),
        *_data_layer_warnings(file.dataLayer, plugins),
    )
    profiles = _make_profiles(file.schedulingProfiles or [], plugins)
    handler = _find_handler(plugins, profiles)
    if isinstance(handler, NoParameters):
        return EndpointPicker(profiles, next(iter(profiles)), None, None, warnings)
    decode, prefill, decider_name = _stages(handler, profiles)
    return EndpointPicker(profiles, decode, prefill, _find_decider(decider_name, plugins), warnings)


def _gate_warnings(given: Sequence[str]) -> Iterator[str]:
    """Yield warnings for the enabled gates, none of which has an effect."""
    for gate in given:
        name, equals, value = gate.partition("=")
        value = value.strip().lower() if equals else "true"
        if name not in _GATES:
            raise ValueError(f"featureGates: {name} is unknown")
        if value not in _TRUE + _FALSE:
            raise ValueError(f"featureGates: {name}: {value} is neither true nor false")
        if value in _TRUE:
            yield f"featureGates: {name} changes nothing: {_GATES[name]}"


def _read_plugins(specs: Sequence[_PluginSpec]) -> dict[str, _Plugin]:
    plugins: dict[str, _Plugin] = {}
    for spec in specs:
        if spec.label in plugins:
            raise ValueError(f"plugins: {spec.label} appears twice")
        try:
            plugins[spec.label] = _Plugin(spec.label, spec.type, _read_parameters(spec))
        except ValueError as error:
            raise ValueError(f"plugins: {spec.label}: {error}") from error
    return plugins


def _read_parameters(spec: _PluginSpec) -> Any:
    if spec.type in _BUILT_IN:
        return None
    if spec.type not in _PARAMETERS:
        raise ValueError(f"type {spec.type} is unknown; known: {', '.join(sorted(_PARAMETERS))}")
    return read(spec.type, _PARAMETERS[spec.type], spec.parameters)


def _plugin_warnings(specs: Sequence[_PluginSpec]) -> Iterator[str]:
    """Yield warnings for plugins and parameters without an effect."""
    for spec in specs:
        parameters, where = spec.parameters or {}, f"plugins: {spec.label}"
        if spec.type in _BUILT_IN:
            if parameters:
                yield f"{where}: its parameters change nothing: prfaas does its work itself"
            continue
        idle = IGNORED.get(spec.type, ()) + _NO_EFFECT.get(spec.type, ())
        yield from (f"{where}: {name} changes nothing in prfaas" for name in parameters if name in idle)
        if parameters.get("ttftSource") == "latencyPredictor":
            yield f"{where}: ttftSource: there is no latency predictor, so no endpoint counts as slow"


def _data_layer_warnings(given: _DataLayer | None, plugins: Mapping[str, _Plugin]) -> Iterator[str]:
    """Yield a warning for a data layer, because prfaas collects the same figures itself."""
    if given is None:
        return
    for source in given.sources or []:
        for item in (source, *(source.extractors or [])):
            if item.pluginRef not in plugins:
                raise ValueError(f"dataLayer: pluginRef {item.pluginRef!r} names no plugin")
            if plugins[item.pluginRef].kind not in _BUILT_IN:
                raise ValueError(f"dataLayer: {item.pluginRef} is no source or extractor")
    yield "dataLayer changes nothing: agents report the load and the caches of their engines"


def _make_profiles(specs: Sequence[_ProfileSpec], plugins: Mapping[str, _Plugin]) -> dict[str, SchedulingProfile]:
    """Return the profiles. Without any, return one profile of all filters and scorers."""
    if not specs:
        used = [
            (plugin, DEFAULT_WEIGHT) for plugin in plugins.values() if plugin.kind in (*FILTERS, *SCORERS, *_PICKERS)
        ]
        return {"default": _make_profile("default", used)}
    profiles: dict[str, SchedulingProfile] = {}
    for spec in specs:
        if spec.name in profiles:
            raise ValueError(f"schedulingProfiles: {spec.name} appears twice")
        used = []
        for reference in spec.plugins or []:
            if reference.pluginRef not in plugins:
                raise ValueError(f"schedulingProfiles: {spec.name}: pluginRef {reference.pluginRef!r} names no plugin")
            weight = DEFAULT_WEIGHT if reference.weight is None else reference.weight
            used.append((plugins[reference.pluginRef], weight))
        profiles[spec.name] = _make_profile(spec.name, used)
    return profiles


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


def _find_handler(
    plugins: Mapping[str, _Plugin], profiles: Mapping[str, SchedulingProfile]
) -> PdHandler | NoParameters:
    """Return the parameters of the only profile handler. A single profile needs none."""
    handlers = [plugin.parameters for plugin in plugins.values() if plugin.kind in _HANDLERS]
    if len(handlers) > 1:
        raise ValueError("plugins: two profile handlers")
    if not handlers and len(profiles) > 1:
        raise ValueError("plugins: several profiles need a profile handler")
    handler: PdHandler | NoParameters = handlers[0] if handlers else NoParameters()
    if isinstance(handler, NoParameters) and len(profiles) > 1:
        raise ValueError("plugins: single-profile-handler takes one profile")
    return handler


def _stages(handler: PdHandler, profiles: Mapping[str, SchedulingProfile]) -> tuple[str, str | None, str]:
    """Return the decode profile, the prefill profile (None if there is none), and the decider's name."""
    nested = handler if isinstance(handler, DisaggHandler) else DisaggHandler()
    decode = nested.profiles.get("decode", handler.decodeProfile)
    prefill = nested.profiles.get("prefill", handler.prefillProfile)
    if decode not in profiles:
        raise ValueError(f"schedulingProfiles: the decode profile {decode!r} is missing")
    decider_name = nested.deciders.get("prefill") or handler.deciderPluginName or nested.prefillDeciderPluginName
    return decode, prefill if prefill in profiles else None, decider_name


def _find_decider(name: str, plugins: Mapping[str, _Plugin]) -> Decider:
    """Return the decider of that name. llm-d's default is prefix-based."""
    if not name:
        return Decider(PrefixDecider())
    plugin = plugins.get(name)
    if plugin is None or plugin.kind not in _DECIDERS:
        raise ValueError(f"deciderPluginName: {name!r} names no decider")
    return Decider(plugin.parameters if isinstance(plugin.parameters, PrefixDecider) else None)
