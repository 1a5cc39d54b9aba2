"""Parameters of llm-d's plugins, with its defaults and accepted values. The names are those of its YAML."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

Port = Annotated[int, Meta(ge=0, le=65_535)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Stage = Literal["decode", "prefill"]
Text = Annotated[str, Meta(min_length=1)]
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


class Parameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a plugin."""


class NoParameters(Parameters, frozen=True):
    """Plugin without parameters."""


class ByLabel(Parameters, frozen=True):
    """`by-label`: endpoints whose label has one of the values."""

    label: Text
    validValues: tuple[str, ...] = ()
    allowsNoLabel: bool = False

    def __post_init__(self) -> None:
        if not (self.validValues or self.allowsNoLabel):
            raise ValueError("validValues: at least one, or allowsNoLabel: true")


class LabelExpression(Parameters, frozen=True):
    """One condition of a Kubernetes label selector."""

    key: Text
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class Selector(Parameters, frozen=True):
    """`label-selector-filter`: a Kubernetes label selector."""

    matchLabels: dict[str, str] = {}
    matchExpressions: tuple[LabelExpression, ...] = ()


class PrefixCacheAffinity(Parameters, frozen=True):
    """`prefix-cache-affinity-filter`. The throughput is llm-d's calibration: tokens/s of Qwen3-32B on two H100."""

    affinityThreshold: Ratio = 0.8
    maxTTFTPenaltyMs: Annotated[float, Meta(ge=0)] = 18_000
    ttftSource: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"
    peakPrefillThroughput: float = 15_928

    def __post_init__(self) -> None:
        needed = self.maxTTFTPenaltyMs > 0 and self.ttftSource == "prefillThroughput"
        if needed and self.peakPrefillThroughput <= 0:
            raise ValueError("peakPrefillThroughput: above 0")


class PrefixCacheScoring(Parameters, frozen=True):
    """`prefix-cache-scorer`."""

    matchLengthWeight: Ratio = 0.0
    matchLengthScaleTokens: Annotated[int, Meta(gt=0)] = 8192


class LoadAware(Parameters, frozen=True):
    """`load-aware-scorer`."""

    threshold: Annotated[int, Meta(gt=0)] = 128


class ActiveRequests(Parameters, frozen=True):
    """`active-request-scorer`."""

    idleThreshold: Annotated[int, Meta(ge=0)] = 0
    maxBusyScore: Ratio = 1.0


class TokenLoad(Parameters, frozen=True):
    """`token-load-scorer`."""

    queueThresholdTokens: Annotated[int, Meta(gt=0)] = 4_194_304


class MaxScore(Parameters, frozen=True):
    """`max-score-picker`."""

    maxNumOfEndpoints: Annotated[int, Meta(ge=1)] = 1


class PrefixDecider(Parameters, frozen=True):
    """`prefix-based-pd-decider`."""

    nonCachedTokens: Annotated[int, Meta(ge=0)] = 0
    promptTokens: Annotated[int, Meta(ge=0)] = 0


class PdHandler(Parameters, frozen=True):
    """`pd-profile-handler`."""

    decodeProfile: str = "decode"
    prefillProfile: str = "prefill"
    primaryPort: Port = 0
    deciderPluginName: str = ""


class DisaggHandler(PdHandler, frozen=True):
    """`disagg-profile-handler`: profiles and deciders by stage. It also reads the flat fields of its predecessor."""

    profiles: dict[Stage, str] = {}
    deciders: dict[Stage, str] = {}
    stageOrder: Literal["decode-first", "DecodeFirst"] = "decode-first"
    prefillDeciderPluginName: str = ""

    def __post_init__(self) -> None:
        flat = (self.decodeProfile, self.prefillProfile) != ("decode", "prefill")
        if self.profiles and flat:
            raise ValueError("profiles: with decodeProfile or prefillProfile")
        if self.deciders and (self.deciderPluginName or self.prefillDeciderPluginName):
            raise ValueError("deciders: with deciderPluginName or prefillDeciderPluginName")


P = TypeVar("P", bound=Parameters)


def read(kind: str, cls: type[P], given: Any) -> P:
    """Return the parameters of a plugin of this kind, without the ignored ones.

    Raises:
        ValueError: a parameter is unknown, of another type, or out of its range.
    """
    if isinstance(given, Mapping):
        given = {name: value for name, value in given.items() if name not in IGNORED.get(kind, ())}
    try:
        return msgspec.convert({} if given is None else given, cls)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(cls)) or "none"
        raise ValueError(f"{error}; known parameters: {known}") from error
