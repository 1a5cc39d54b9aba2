"""Parameters of llm-d's plugins, with its defaults and accepted values. The names are those of its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

P = TypeVar("P")
Operator = Literal["In", "NotIn", "Exists", "DoesNotExist"]
_PRODUCER = ("prefixMatchInfoProducerName", "prefixPluginName", "prefixPluginType")
_LOAD_PRODUCER = ("inFlightLoadProducerName",)

# Parameters without an effect, because prfaas does their work itself: exact prefixes in one index, and one set of load
# figures. They are accepted, because llm-d's files name them, and reported as warnings.
IGNORED: dict[str, tuple[str, ...]] = {
    "prefix-cache-scorer": (
        *_PRODUCER,
        "blockSize",
        "blockSizeTokens",
        "hashBlockSize",
        "maxPrefixBlocksToMatch",
        "lruCapacityPerServer",
        "autoTune",
    ),
    "precise-prefix-cache-scorer": (
        "tokenProcessorConfig",
        "indexerConfig",
        "kvEventsConfig",
        "speculativeIndexing",
        "speculativeTTL",
    ),
    "prefix-cache-affinity-filter": (*_PRODUCER, *_LOAD_PRODUCER, "latencyPredictionInfoProducerName"),
    "no-hit-lru-scorer": (*_PRODUCER, "lruSize"),
    "active-request-scorer": (*_LOAD_PRODUCER, "requestTimeout"),
    "token-load-scorer": _LOAD_PRODUCER,
    "pd-profile-handler": (*_PRODUCER, "hashBlockSize"),
}


@dataclass(frozen=True)
class NoParameters:
    """Plugin without parameters."""


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
        operators = get_args(Operator)
        for expression in self.matchExpressions:
            _require(expression.get("operator") in operators, f"operator: one of {', '.join(operators)}")
            _require(bool(expression.get("key")), "key: the name of a label")


@dataclass(frozen=True)
class PrefixCacheAffinity:
    """`prefix-cache-affinity-filter`. The throughput is llm-d's calibration: tokens/s of Qwen3-32B on two H100."""

    affinityThreshold: float = 0.8
    maxTTFTPenaltyMs: float = 18_000
    ttftSource: str = "prefillThroughput"
    peakPrefillThroughput: float = 15_928

    def __post_init__(self) -> None:
        _require(0 <= self.affinityThreshold <= 1, "affinityThreshold: from 0 to 1")
        _require(self.maxTTFTPenaltyMs >= 0, "maxTTFTPenaltyMs: at least 0")
        known = ("prefillThroughput", "latencyPredictor")
        _require(self.ttftSource in known, f"ttftSource: one of {', '.join(known)}")
        needed = self.maxTTFTPenaltyMs > 0 and self.ttftSource == "prefillThroughput"
        _require(self.peakPrefillThroughput > 0 or not needed, "peakPrefillThroughput: above 0")


@dataclass(frozen=True)
class PrefixCacheScoring:
    """`prefix-cache-scorer`."""

    matchLengthWeight: float = 0.0
    matchLengthScaleTokens: int = 8192

    def __post_init__(self) -> None:
        _require(0 <= self.matchLengthWeight <= 1, "matchLengthWeight: from 0 to 1")
        _require(self.matchLengthScaleTokens > 0, "matchLengthScaleTokens: above 0")


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

    def __post_init__(self) -> None:
        _require(self.idleThreshold >= 0, "idleThreshold: at least 0")
        _require(0 <= self.maxBusyScore <= 1, "maxBusyScore: from 0 to 1")


@dataclass(frozen=True)
class TokenLoad:
    """`token-load-scorer`."""

    queueThresholdTokens: int = 4_194_304

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
    """`pd-profile-handler`."""

    decodeProfile: str = "decode"
    prefillProfile: str = "prefill"
    primaryPort: int = 0
    deciderPluginName: str = ""

    def __post_init__(self) -> None:
        _require(0 <= self.primaryPort <= 65_535, "primaryPort: from 0 to 65535")


@dataclass(frozen=True)
class DisaggHandler:
    """`disagg-profile-handler`: profiles and deciders by stage. It also reads the flat fields of its predecessor."""

    profiles: Mapping[str, str] = field(default_factory=dict)
    deciders: Mapping[str, str] = field(default_factory=dict)
    stageOrder: str = "decode-first"
    decodeProfile: str = "decode"
    prefillProfile: str = "prefill"
    deciderPluginName: str = ""
    primaryPort: int = 0

    def __post_init__(self) -> None:
        _require(self.stageOrder == "decode-first", "stageOrder: decode-first, the only order offered")
        stages = set(self.profiles) | set(self.deciders)
        _require(stages <= {"decode", "prefill"}, "profiles, deciders: decode, prefill")
        _require(0 <= self.primaryPort <= 65_535, "primaryPort: from 0 to 65535")


def read(kind: str, cls: type[P], given: Mapping[str, Any] | None) -> P:
    """Return the parameters of a plugin of this kind, without the ignored ones.

    Raises:
        ValueError: a parameter is unknown, of another type, or out of its range.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ValueError("parameters: a mapping")
    hints, ignored = get_type_hints(cls), IGNORED.get(kind, ())
    values = {}
    for name, value in (given or {}).items():
        if name in hints:
            values[name] = _typed(name, value, hints[name])
        elif name not in ignored:
            known = ", ".join([*(known.name for known in fields(cls)), *ignored]) or "none"  # type: ignore[arg-type]
            raise ValueError(f"{name}: unknown parameter; known: {known}")
    return cls(**values)


def _typed(name: str, value: Any, kind: Any) -> Any:
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
