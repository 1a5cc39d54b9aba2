"""Configurations that llm-d-router ebab6879, its predecessors and its guides ship."""

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from prfaas.errors import ConfigError
from prfaas.scheduler.endpoint_picker.config import load
from prfaas.scheduler.endpoint_picker.picker import EndpointPicker
from prfaas.scheduler.endpoint_picker.plugins import ROLE_LABEL, Endpoint

OLD, CURRENT, NEXT = "inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1alpha1", "llm-d.ai/v1"
PRODUCERS: dict[str, Any] = {
    "token-producer": {"modelName": "org/model", "vllm": {"url": "http://localhost:8000"}},
    "precise-prefix-cache-producer": {"tokenProcessorConfig": {"blockSize": 16, "hashSeed": "42"}},
    "endpoint-notification-source": {},
    "metrics-data-source": {},
    "core-metrics-extractor": {},
}
SOURCES = {
    "sources": [
        {"pluginRef": "metrics-data-source", "extractors": [{"pluginRef": "core-metrics-extractor"}]},
        {"pluginRef": "endpoint-notification-source", "extractors": [{"pluginRef": "precise-prefix-cache-producer"}]},
    ]
}
ONE: dict[str, Any] = {"decode-filter": {}, "max-score-picker": {}, "single-profile-handler": {}}
SPLIT: dict[str, Any] = {
    **{kind: {} for kind in ("prefix-cache-scorer", "queue-scorer", "prefill-filter", "decode-filter")},
    "max-score-picker": {},
    "prefix-based-pd-decider": {"nonCachedTokens": 16},
    "disagg-profile-handler": {"deciders": {"prefill": "prefix-based-pd-decider"}},
}
BOTH = {
    stage: {f"{stage}-filter": 1, "max-score-picker": 1, "prefix-cache-scorer": 2, "queue-scorer": 1}
    for stage in ("prefill", "decode")
}
GUIDE: dict[str, Any] = {
    **{kind: {} for kind in ("prefill-filter", "decode-filter", "active-request-scorer", "max-score-picker")},
    **{kind: {} for kind in ("inflight-load-producer", "always-disagg-pd-decider")},
    "token-load-scorer": {"inFlightLoadProducerName": "inflight-load-producer"},
    "approx-prefix-cache-producer": {"maxPrefixTokensToMatch": 131072},
    "prefix-cache-affinity-filter": {"peakPrefillThroughput": 33821},
    "disagg-profile-handler": {"deciders": {"prefill": "always-disagg-pd-decider"}},
}
STAGES_OF_GUIDE = {
    "prefill": {"prefill-filter": 1, "prefix-cache-affinity-filter": 1, "token-load-scorer": 1},
    "decode": {"decode-filter": 1, "active-request-scorer": 1, "max-score-picker": 1},
}


def _file(
    plugins: Mapping[str, Any], profiles: Mapping[str, Mapping[str, float]], *, api: str = CURRENT, **more: Any
) -> str:
    """Return a configuration from the parameters of each plugin, and its weight in each profile."""
    fields = {
        "apiVersion": api,
        "kind": "EndpointPickerConfig",
        "plugins": [{"type": kind, "parameters": parameters} for kind, parameters in plugins.items()],
        "schedulingProfiles": [
            {"name": name, "plugins": [{"pluginRef": ref, "weight": weight} for ref, weight in weights.items()]}
            for name, weights in profiles.items()
        ],
    }
    return yaml.safe_dump(fields | more, sort_keys=False)


def _one_profile(**scorers: float) -> dict[str, Any]:
    named = {kind.replace("_", "-"): weight for kind, weight in scorers.items()}
    return {"default": {"decode-filter": 1, "max-score-picker": 1, **named}}


LOADED: dict[str, tuple[str, tuple[str, ...]]] = {
    "an index fed by a data layer": (
        _file(
            {
                **PRODUCERS,
                "prefix-cache-scorer": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"},
                "kv-cache-utilization-scorer": {},
                **ONE,
            },
            _one_profile(prefix_cache_scorer=2, kv_cache_utilization_scorer=1),
            dataLayer=SOURCES,
        ),
        ("token-producer", "precise-prefix-cache-producer", "prefixMatchInfoProducerName", "dataLayer changes nothing"),
    ),
    "cold requests spread": (
        _file({"no-hit-lru-scorer": {"lruSize": 2048}, **ONE}, _one_profile(no_hit_lru_scorer=1)),
        ("lruSize",),
    ),
    "P/D of the guides": (
        _file(GUIDE, STAGES_OF_GUIDE, api=NEXT),
        ("inFlightLoadProducerName", "approx-prefix-cache-producer"),
    ),
    "P/D of llm-d-inference-scheduler": (
        _file({"disagg-headers-handler": {}, **SPLIT, "prefix-cache-scorer": {"blockSizeTokens": 16}}, BOTH, api=OLD),
        ("blockSizeTokens",),
    ),
    "the precise scorer's older name": (
        _file(
            {"precise-prefix-cache-scorer": {"indexerConfig": {}}, **ONE},
            _one_profile(precise_prefix_cache_scorer=2),
            api=OLD,
        ),
        ("indexerConfig",),
    ),
    "gates of the router's own work": (
        _file(ONE, _one_profile(), featureGates=["flowControl", "prepareDataPlugins=false"]),
        ("flowControl",),
    ),
    "no latency predictor": (
        _file({"prefix-cache-affinity-filter": {"ttftSource": "latencyPredictor"}, **ONE}, _one_profile()),
        ("no latency predictor",),
    ),
}
REFUSED: dict[str, tuple[str, str]] = {
    "encode by the handler": (
        _file({**SPLIT, "disagg-profile-handler": {"deciders": {"encode": "prefix-based-pd-decider"}}}, BOTH),
        "disagg-profile-handler: .*encode",
    ),
    "flow control": (_file(ONE, _one_profile(), flowControl={"enableEviction": True}), "flowControl"),
    "endpoints that a data layer finds": (
        _file(ONE, _one_profile(), dataLayer={"discovery": {"pluginRef": "x"}}),
        "discovery",
    ),
    "a data layer of plugins that are not there": (
        _file(ONE, _one_profile(), dataLayer=SOURCES),
        "dataLayer: pluginRef 'metrics-data-source' names no plugin",
    ),
    "a limit in the handler": (
        _file({"pd-profile-handler": {"threshold": 10}}, {"decode": {}, "prefill": {}}, api=OLD),
        "pd-profile-handler: .*threshold",
    ),
    **{
        kind: (_file({kind: {}, **ONE}, _one_profile()), f"type {kind} is unknown")
        for kind in ("data-parallel-profile-handler", "session-affinity-scorer", "lora-affinity-scorer")
    },
}


@pytest.mark.parametrize(("text", "warned"), LOADED.values(), ids=LOADED)
def test_shipped_files_load_with_warnings_for_settings_without_effect(text: str, warned: tuple[str, ...]) -> None:
    warnings = load(text, name="epp.yaml").warnings
    assert len(warnings) == len(warned), warnings
    assert all(any(part in warning for warning in warnings) for part in warned), warnings


@pytest.mark.parametrize(("text", "says"), REFUSED.values(), ids=REFUSED)
def test_unsupported_features_are_rejected_by_name(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"epp\.yaml: .*{says}"):
        load(text, name="epp.yaml")


def _splits(picker: EndpointPicker, num_tokens: int) -> bool:
    decode = Endpoint("d", {ROLE_LABEL: "decode"}, num_cached_tokens=0)
    prefill = Endpoint("p", {ROLE_LABEL: "prefill"})
    return picker.pick_prefill([decode, prefill], num_tokens, decode)[0] is not None


@pytest.mark.parametrize(
    ("name", "split"),
    [("P/D of llm-d-inference-scheduler", (False, True, True)), ("P/D of the guides", (True, True, True))],
)
def test_limit_counts_from_the_uncached_tokens_in_every_apiversion(name: str, split: tuple[bool, ...]) -> None:
    picker = load(LOADED[name][0], name="x")
    assert tuple(_splits(picker, num_tokens) for num_tokens in (15, 16, 17)) == split


def test_precise_scorer_scores_by_the_cached_share() -> None:
    picker = load(LOADED["the precise scorer's older name"][0], name="x")
    cold, warm = (Endpoint(name, num_cached_tokens=cached) for name, cached in (("cold", 1), ("warm", 9)))
    assert picker.profiles["default"].scores([cold, warm], 10) == [0.2, 1.8]


FILE = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: load-aware-scorer
  parameters:
    threshold: 5
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: load-aware-scorer
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("threshold: 5", "threshold: 0", "plugins: load-aware-scorer: .*threshold"),
        ("- type: load-aware-scorer", "- name: max", "type.*plugins"),
        ("- name: default", "- name: ''", "name"),
        ("- pluginRef: load-aware-scorer", "- {pluginRef: load-aware-scorer, weight: x}", "weight"),
        ("llm-d.ai/v1alpha1", "llm-d.ai/v9", "apiVersion"),
        ("kind: EndpointPickerConfig", "kind: Pod", "kind"),
        ("schedulingProfiles:", "profiles:", "profiles"),
        ("    threshold: 5", "    threshold: [5", "not YAML: "),
    ],
)
def test_error_names_its_key_in_one_line(old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^epp\.yaml: .*{says}.*$"):
        load(FILE.replace(old, new, 1), name="epp.yaml")
