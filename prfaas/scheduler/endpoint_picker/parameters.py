"""The parameters of each plugin: their defaults, and which values llm-d accepts. Names are those of its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

P = TypeVar("P")
Operator = Literal["In", "NotIn", "Exists", "DoesNotExist"]


@dataclass(frozen=True)
class NoParameters:
    """A plugin that has none."""


@dataclass(frozen=True)
class ByLabel:
    """`by-label`: endpoints whose label has one of the values."""

    label: str = ""
    validValues: tuple[str, ...] = ()
    allowsNoLabel: bool = False

    def __post_init__(self) -> None:
        _require(bool(self.label), "label: the name of a label")
        _require(bool(self.validValues) or self.allowsNoLabel, "validValues: at least one, or allowsNoLabel: true")


@dataclass(frozen=True)
class Selector:
    """`label-selector-filter`: a Kubernetes label selector."""

    matchLabels: Mapping[str, str] = field(default_factory=dict)
    matchExpressions: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for expression in self.matchExpressions:
            _require(
                expression.get("operator") in get_args(Operator), f"operator: one of {', '.join(get_args(Operator))}"
            )
            _require(bool(expression.get("key")), "key: the name of a label")


@dataclass(frozen=True)
class PrefixCacheAffinity:
    """`prefix-cache-affinity-filter`."""

    affinityThreshold: float = 0.8
    maxTTFTPenaltyMs: float = 18_000
    ttftSource: str = "prefillThroughput"
    peakPrefillThroughput: float = 15_928  # tokens/s: Qwen3-32B on two H100, upstream's calibration
    prefixMatchInfoProducerName: str = ""
    inFlightLoadProducerName: str = ""
    latencyPredictionInfoProducerName: str = ""

    def __post_init__(self) -> None:
        _require(0 <= self.affinityThreshold <= 1, "affinityThreshold: from 0 to 1")
        _require(self.maxTTFTPenaltyMs >= 0, "maxTTFTPenaltyMs: at least 0")
        known = ("prefillThroughput", "latencyPredictor")
        _require(self.ttftSource in known, f"ttftSource: one of {', '.join(known)}")
        needed = self.maxTTFTPenaltyMs > 0 and self.ttftSource == "prefillThroughput"
        _require(self.peakPrefillThroughput > 0 or not needed, "peakPrefillThroughput: above 0")


@dataclass(frozen=True)
class PrefixCacheScoring:
    """`prefix-cache-scorer`. The fields after the first two tuned a producer of its own in older releases."""

    matchLengthWeight: float = 0.0
    matchLengthScaleTokens: int = 8192
    prefixMatchInfoProducerName: str = ""
    blockSize: int = 0
    blockSizeTokens: int = 0
    hashBlockSize: int = 0
    maxPrefixBlocksToMatch: int = 256
    lruCapacityPerServer: int = 31_250
    autoTune: bool = True

    def __post_init__(self) -> None:
        _require(0 <= self.matchLengthWeight <= 1, "matchLengthWeight: from 0 to 1")
        _require(self.matchLengthScaleTokens > 0, "matchLengthScaleTokens: above 0")


@dataclass(frozen=True)
class PrecisePrefixCache:
    """`precise-prefix-cache-scorer`, the older name of a `prefix-cache-scorer` and the producer of what it reads."""

    tokenProcessorConfig: Mapping[str, Any] = field(default_factory=dict)
    indexerConfig: Mapping[str, Any] = field(default_factory=dict)
    kvEventsConfig: Mapping[str, Any] = field(default_factory=dict)
    speculativeIndexing: bool = False
    speculativeTTL: str = ""


@dataclass(frozen=True)
class NoHitLru:
    """`no-hit-lru-scorer`."""

    lruSize: int = 0
    prefixPluginName: str = ""
    prefixPluginType: str = ""
    prefixMatchInfoProducerName: str = ""


@dataclass(frozen=True)
class LoadAware:
    """`load-aware-scorer`."""

    threshold: int = 128

    def __post_init__(self) -> None:
        _require(self.threshold > 0, "threshold: above 0")


@dataclass(frozen=True)
class ActiveRequests:
    """`active-request-scorer`."""

    idleThreshold: int = 0
    maxBusyScore: float = 1.0
    requestTimeout: str = ""
    inFlightLoadProducerName: str = ""

    def __post_init__(self) -> None:
        _require(self.idleThreshold >= 0, "idleThreshold: at least 0")
        _require(0 <= self.maxBusyScore <= 1, "maxBusyScore: from 0 to 1")


@dataclass(frozen=True)
class TokenLoad:
    """`token-load-scorer`."""

    queueThresholdTokens: int = 4_194_304
    inFlightLoadProducerName: str = ""

    def __post_init__(self) -> None:
        _require(self.queueThresholdTokens > 0, "queueThresholdTokens: above 0")


@dataclass(frozen=True)
class MaxScore:
    """`max-score-picker`."""

    maxNumOfEndpoints: int = 1

    def __post_init__(self) -> None:
        _require(self.maxNumOfEndpoints >= 1, "maxNumOfEndpoints: at least 1")


@dataclass(frozen=True)
class PrefixDecider:
    """`prefix-based-pd-decider`."""

    nonCachedTokens: int = 0
    promptTokens: int = 0

    def __post_init__(self) -> None:
        _require(self.nonCachedTokens >= 0, "nonCachedTokens: at least 0")
        _require(self.promptTokens >= 0, "promptTokens: at least 0")


@dataclass(frozen=True)
class PdHandler:
    """`pd-profile-handler`. Upstream never used the prefix plugin's name and type; releases before the deciders had the
    limit here.
    """

    decodeProfile: str = "decode"
    prefillProfile: str = "prefill"
    primaryPort: int = 0
    deciderPluginName: str = ""
    prefixPluginName: str = ""
    prefixPluginType: str = ""
    prefixMatchInfoProducerName: str = ""
    threshold: int | None = None
    hashBlockSize: int = 1

    def __post_init__(self) -> None:
        _require(0 <= self.primaryPort <= 65_535, "primaryPort: from 0 to 65535")
        _require(self.threshold is None or self.threshold >= 0, "threshold: at least 0")
        _require(self.hashBlockSize > 0, "hashBlockSize: above 0")


@dataclass(frozen=True)
class DisaggHandler:
    """`disagg-profile-handler`: profiles and deciders by stage; the flat fields of its predecessor are still read."""

    profiles: Mapping[str, str] = field(default_factory=dict)
    deciders: Mapping[str, str] = field(default_factory=dict)
    stageOrder: str = "decode-first"
    decodeProfile: str = "decode"
    prefillProfile: str = "prefill"
    deciderPluginName: str = ""
    primaryPort: int = 0

    def __post_init__(self) -> None:
        _require(self.stageOrder == "decode-first", "stageOrder: decode-first, the one order that is offered here")
        _require(
            set(self.profiles) | set(self.deciders) <= {"decode", "prefill"}, "profiles, deciders: decode, prefill"
        )
        _require(0 <= self.primaryPort <= 65_535, "primaryPort: from 0 to 65535")


def read(cls: type[P], given: Mapping[str, Any] | None) -> P:
    """Return the parameters in `given`.

    Raises:
        ValueError: a field is unknown, of another type, or out of its range.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ValueError("parameters: a mapping")
    hints = get_type_hints(cls)
    values = {}
    for name, value in (given or {}).items():
        if name not in hints:
            known = ", ".join(one.name for one in fields(cls)) or "none"  # type: ignore[arg-type]
            raise ValueError(f"{name}: unknown parameter; known: {known}")
        values[name] = _typed(name, value, hints[name])
    return cls(**values)


def _typed(name: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is UnionType:  # with None, which is the default
        kind = get_args(kind)[0]
    origin = get_origin(kind) or kind
    if origin is tuple and isinstance(value, list):
        return tuple(value)
    if origin is float and type(value) is int:
        return float(value)
    wanted = {tuple: list, Mapping: Mapping}.get(origin, origin)
    if isinstance(value, wanted) and (wanted is bool or type(value) is not bool):
        return value
    raise ValueError(f"{name}: {value!r} is no {getattr(wanted, '__name__', wanted)}")


def _require(condition: bool, accepted: str) -> None:
    if not condition:
        raise ValueError(accepted)
