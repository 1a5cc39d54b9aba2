"""Reads an `EndpointPickerConfig` as it stands in llm-d's files, of the old apiVersion and of the current one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from prfaas.errors import ConfigError
from prfaas.scheduler.endpoint_picker.parameters import (
    DisaggHandler,
    MaxScore,
    NoParameters,
    PdHandler,
    PrefixDecider,
    read,
)
from prfaas.scheduler.endpoint_picker.picker import Decider, EndpointPicker, Rules, SchedulingProfile
from prfaas.scheduler.endpoint_picker.plugins import FILTERS, SCORERS
from prfaas.scheduler.endpoint_picker.yaml_lines import Fault, line_of, on_line, read_yaml

_RULES: dict[str, Rules] = {
    "inference.networking.x-k8s.io/v1alpha1": "seed",
    "llm-d.ai/v1alpha1": "current",
    "llm-d.ai/v1": "current",
}
_GATES = {
    "flowControl": "requests queue, and are refused, at the router (admission, quotas)",
    "haPopulateNonLeaderDatastore": "every manager knows all instances",
}
_GONE_GATES = ("prepareDataPlugins", "dataLayer")  # needed by the old rules, accepted with a warning by the new ones
_PICKERS = {"max-score-picker": MaxScore}
_DECIDERS = {"prefix-based-pd-decider": PrefixDecider, "always-disagg-pd-decider": NoParameters}
_KNOWN_EXACTLY = "what is cached where is known, not estimated"
_PRODUCERS = {  # wiring between plugins, of which there is none here
    "prefixMatchInfoProducerName": "what is cached is the same for every plugin",
    "inFlightLoadProducerName": "what is under way is the same for every plugin",
    "latencyPredictionInfoProducerName": "there is no latency predictor here",
    **dict.fromkeys(("prefixPluginName", "prefixPluginType"), "what is cached is the same for every plugin"),
}
_NOTHING_READS: dict[str, Mapping[str, str]] = {  # accepted, since llm-d's files name them; told as warnings
    "prefix-cache-scorer": dict.fromkeys(
        ("blockSize", "blockSizeTokens", "hashBlockSize", "maxPrefixBlocksToMatch", "lruCapacityPerServer", "autoTune"),
        _KNOWN_EXACTLY,
    ),
    "precise-prefix-cache-scorer": dict.fromkeys(
        ("tokenProcessorConfig", "indexerConfig", "kvEventsConfig", "speculativeIndexing", "speculativeTTL"),
        "agents tell what is cached where",
    ),
    "no-hit-lru-scorer": {"lruSize": "every instance is remembered"},
    "active-request-scorer": {"requestTimeout": "a request counts until it ends"},
    "max-score-picker": {"maxNumOfEndpoints": "the best endpoint alone is taken"},
    "pd-profile-handler": {"primaryPort": "each instance has its own address", "hashBlockSize": _KNOWN_EXACTLY},
    "disagg-profile-handler": {"primaryPort": "each instance has its own address"},
}
_SAYS_NOTHING = {
    "lora-affinity-scorer": "which adapters an engine has loaded is not known here; all endpoints score alike"
}
_HANDLERS = {
    "pd-profile-handler": PdHandler,
    "disagg-profile-handler": DisaggHandler,
    "single-profile-handler": NoParameters,
}
# What these do is done here without them: exact prefix knowledge, token counts, engines' figures, the routing headers.
_DONE_OTHERWISE = (
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


@dataclass(frozen=True)
class _Plugin:
    name: str
    kind: str
    parameters: Any
    line: int = 0


@lru_cache(maxsize=8)  # a snapshot carries the text, so that it replays alone
def load(text: str, *, name: str) -> EndpointPicker:
    """Return the picker that a YAML text describes; `name` is the file's, for messages.

    Raises:
        ConfigError: it is no EndpointPickerConfig, or one that llm-d would refuse as well; it names what and where.
    """
    try:
        with on_line(0):
            return _picker(read_yaml(text))
    except Fault as fault:
        where = f"{name} line {fault.line}" if fault.line else name
        raise ConfigError(f"{where}: {fault}") from fault


def _picker(fields: Any) -> EndpointPicker:
    if not isinstance(fields, Mapping) or fields.get("kind") != "EndpointPickerConfig":
        raise Fault(line_of(fields, "kind"), "kind: EndpointPickerConfig is expected")
    unknown = set(fields) - {"apiVersion", "kind", "featureGates", "plugins", "schedulingProfiles", "dataLayer"}
    if unknown:
        key = sorted(map(str, unknown))[0]
        raise Fault(line_of(fields, key), f"{key}: unknown key")
    if fields.get("apiVersion") not in _RULES:
        raise Fault(line_of(fields, "apiVersion"), f"apiVersion: one of {', '.join(_RULES)}")
    rules = _RULES[fields["apiVersion"]]
    with on_line(line_of(fields, "featureGates")):
        gates, warnings = _gates(fields.get("featureGates") or [], rules)
    with on_line(line_of(fields, "plugins")):
        plugins = _plugins(fields.get("plugins") or [])
        warnings += _vain(fields.get("plugins") or [])
    with on_line(line_of(fields, "dataLayer")):
        warnings += _data_layer(fields.get("dataLayer"), plugins)
    with on_line(line_of(fields, "schedulingProfiles")):
        profiles = _profiles(fields.get("schedulingProfiles"), plugins)
    handler = _handler(plugins, profiles)
    if isinstance(handler.parameters, NoParameters):
        return EndpointPicker(profiles, next(iter(profiles)), None, None, warnings)
    with on_line(handler.line):
        decode, prefill, decider_name = _stages(handler.parameters, profiles)
        decider = _threshold(handler.parameters, rules) or _decider(decider_name, plugins, rules)
        needs_gate = rules == "seed" and handler.kind == "pd-profile-handler" and bool(decider_name)
        if needs_gate and decider.prefix is not None and "prepareDataPlugins" not in gates:
            raise ValueError("featureGates: prefix-based-pd-decider needs prepareDataPlugins beside pd-profile-handler")
    return EndpointPicker(profiles, decode, prefill, decider, warnings)


def _gates(given: Sequence[Any], rules: Rules) -> tuple[set[str], tuple[str, ...]]:
    """Return the gates that are on, and warnings for those that nothing reads any more."""
    on, warnings = set(), []
    for gate in given:
        name, _, value = str(gate).partition("=")
        if name not in (*_GATES, *_GONE_GATES):
            raise ValueError(f"featureGates: {name} is unknown")
        if name in _GONE_GATES and rules == "current":
            warnings.append(f"featureGates: {name} is no more; it changes nothing")
        if name in _GATES and value != "false":
            warnings.append(f"featureGates: {name} changes nothing here: {_GATES[name]}")
        if value != "false":
            on.add(name)
    return on, tuple(warnings)


def _plugins(given: Sequence[Any]) -> dict[str, _Plugin]:
    plugins: dict[str, _Plugin] = {}
    for item in given:
        if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
            raise Fault(line_of(item), "plugins: each has a type")
        kind, name = item["type"], item.get("name") or item["type"]
        line = line_of(item, "type")
        if name in plugins:
            raise Fault(line, f"plugins: {name} is there twice")
        try:
            plugins[name] = _Plugin(name, kind, _parameters(kind, item.get("parameters")), line)
        except ValueError as error:
            text = str(error)
            lines = getattr(item.get("parameters"), "lines", {})
            raise Fault(lines.get(text.partition(":")[0], line), f"plugins: {name}: {text}") from error
    return plugins


def _vain(given: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Warnings for plugins and parameters that change nothing here."""
    found = []
    for item in given:
        kind, parameters = item["type"], item.get("parameters") or {}
        where = f"plugins: {item.get('name') or kind}"
        if kind in _SAYS_NOTHING:
            found.append(f"{where}: {_SAYS_NOTHING[kind]}")
        if kind in _DONE_OTHERWISE and parameters:
            found.append(f"{where}: its parameters change nothing: what it does is done without it")
        reasons = {**_PRODUCERS, **_NOTHING_READS.get(kind, {})}
        found += [f"{where}: {name} changes nothing: {reasons[name]}" for name in parameters if name in reasons]
        if kind == "pd-profile-handler" and parameters.get("threshold"):
            found.append(
                f"{where}: threshold counts uncached tokens, as nonCachedTokens does; in llm-d it counted characters"
            )
        if parameters.get("ttftSource") == "latencyPredictor":
            found.append(f"{where}: ttftSource: there is no latency predictor here; no endpoint counts as slow")
    return tuple(found)


def _data_layer(given: Any, plugins: Mapping[str, _Plugin]) -> tuple[str, ...]:
    """Return a warning for a data layer, which has sources fill what is known here anyway."""
    if given is None:
        return ()
    unknown = set(given) - {"injectDefaults", "sources"}
    if unknown:
        key = sorted(map(str, unknown))[0]
        raise Fault(line_of(given, key), f"dataLayer: {key} is not offered")
    for source in given.get("sources") or []:
        for item in (source, *(source.get("extractors") or [])):
            if item.get("pluginRef") not in plugins:
                raise Fault(line_of(item), f"dataLayer: pluginRef {item.get('pluginRef')!r} names no plugin")
    return ("dataLayer changes nothing: agents tell what their engines run and have cached",)


def _parameters(kind: str, given: Any) -> Any:
    if kind in _DONE_OTHERWISE:
        return None
    known: dict[str, type[Any]] = {name: cls for name, (cls, _) in (FILTERS | SCORERS).items()}
    known |= _PICKERS | _DECIDERS | _HANDLERS
    if kind not in known:
        raise ValueError(f"type {kind} is unknown; known: {', '.join(sorted(known))}")
    return read(known[kind], given)


def _profiles(given: Any, plugins: Mapping[str, _Plugin]) -> dict[str, SchedulingProfile]:
    """Return the profiles; without any, one of all filters and scorers."""
    if not given:
        used = [(plugin, 1.0) for plugin in plugins.values() if plugin.kind in (*FILTERS, *SCORERS, *_PICKERS)]
        return {"default": _profile("default", used)}
    profiles: dict[str, SchedulingProfile] = {}
    for item in given:
        with on_line(line_of(item, "name")):
            name = item.get("name")
            if not name:
                raise ValueError("schedulingProfiles: each has a name")
            if name in profiles:
                raise ValueError(f"schedulingProfiles: {name} is there twice")
            profiles[name] = _profile(name, [_referenced(one, plugins, name) for one in item.get("plugins") or []])
    return profiles


def _referenced(item: Mapping[str, Any], plugins: Mapping[str, _Plugin], profile: str) -> tuple[_Plugin, float]:
    with on_line(line_of(item)):
        reference = item.get("pluginRef")
        if not reference or reference not in plugins:
            raise ValueError(f"schedulingProfiles: {profile}: pluginRef {reference!r} names no plugin")
        return plugins[reference], float(item.get("weight", 1.0))


def _profile(name: str, used: Sequence[tuple[_Plugin, float]]) -> SchedulingProfile:
    pickers = [plugin for plugin, _ in used if plugin.kind in _PICKERS]
    if len(pickers) > 1:
        raise ValueError(f"schedulingProfiles: {name}: two pickers")
    for plugin, _ in used:
        if plugin.kind not in (*FILTERS, *SCORERS, *_PICKERS):
            raise ValueError(f"schedulingProfiles: {name}: {plugin.name} is no filter, scorer or picker")
    filters = tuple((FILTERS[its.kind][1], its.parameters) for its, _ in used if its.kind in FILTERS)
    scorers = tuple((SCORERS[its.kind][1], its.parameters, weight) for its, weight in used if its.kind in SCORERS)
    return SchedulingProfile(name, filters, scorers, pickers[0].parameters.maxNumOfEndpoints if pickers else 1)


def _handler(plugins: Mapping[str, _Plugin], profiles: Mapping[str, SchedulingProfile]) -> _Plugin:
    """Return the one profile handler; a single profile does without."""
    handlers = [plugin for plugin in plugins.values() if plugin.kind in _HANDLERS]
    if len(handlers) > 1:
        raise Fault(handlers[1].line, "plugins: two profile handlers")
    if not handlers and len(profiles) > 1:
        raise ValueError("plugins: several profiles need a profile handler")
    if handlers and isinstance(handlers[0].parameters, NoParameters) and len(profiles) > 1:
        raise Fault(handlers[0].line, "plugins: single-profile-handler takes one profile")
    return handlers[0] if handlers else _Plugin("single-profile-handler", "single-profile-handler", NoParameters())


def _stages(its: PdHandler | DisaggHandler, profiles: Mapping[str, SchedulingProfile]) -> tuple[str, str | None, str]:
    """Decode profile, prefill profile (None when there is none), and the decider's name."""
    nested = its if isinstance(its, DisaggHandler) else DisaggHandler()
    decode = nested.profiles.get("decode", its.decodeProfile)
    prefill = nested.profiles.get("prefill", its.prefillProfile)
    if decode not in profiles:
        raise ValueError(f"schedulingProfiles: the decode profile {decode!r} is not there")
    return decode, prefill if prefill in profiles else None, nested.deciders.get("prefill", its.deciderPluginName)


def _threshold(its: PdHandler | DisaggHandler, rules: Rules) -> Decider | None:
    """The decider of a handler that has its limit itself, as the first ones of the old apiVersion did; None: it has none."""
    if isinstance(its, DisaggHandler) or its.threshold is None:
        return None
    if rules != "seed" or its.deciderPluginName:
        raise ValueError("threshold: under the old apiVersion and without a decider; write a prefix-based-pd-decider")
    return Decider(rules, PrefixDecider(its.threshold))


def _decider(name: str, plugins: Mapping[str, _Plugin], rules: Rules) -> Decider:
    """Return the decider of that name. Upstream's default is always-disagg under the old apiVersion, prefix-based since."""
    if not name:
        return Decider(rules, None if rules == "seed" else PrefixDecider())
    plugin = plugins.get(name)
    if plugin is None or plugin.kind not in _DECIDERS:
        raise ValueError(f"deciderPluginName: {name!r} names no decider")
    return Decider(rules, plugin.parameters if isinstance(plugin.parameters, PrefixDecider) else None)
