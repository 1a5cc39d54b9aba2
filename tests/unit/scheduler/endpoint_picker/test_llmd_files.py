"""Configurations that llm-d-router ebab6879, its predecessors and its guides ship."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from prfaas.errors import ConfigError
from prfaas.scheduler.endpoint_picker.config import load
from prfaas.scheduler.endpoint_picker.picker import EndpointPicker
from prfaas.scheduler.endpoint_picker.plugins import ROLE_LABEL, Endpoint, PickRequest

OLD, CURRENT, NEXT = "inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1alpha1", "llm-d.ai/v1"
TOKENS = {"modelName": "org/model", "vllm": {"url": "http://localhost:8000"}}
PRECISE = {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"}
INDEX = {"kvBlockIndexConfig": {"enableMetrics": True}}
FED_BY_DATA: dict[str, Any] = {
    "endpoint-notification-source": {},
    "metrics-data-source": {},
    "core-metrics-extractor": {},
}
FED_BY_EVENTS = {
    "token-producer": TOKENS,
    "precise-prefix-cache-producer": {
        "tokenProcessorConfig": {"blockSize": 16, "hashSeed": "42"},
        "kvEventsConfig": {"zmqEndpoint": "tcp://0.0.0.0:5557"},
        "indexerConfig": INDEX,
    },
}
APPROXIMATE = {"approx-prefix-cache-producer": {"maxPrefixTokensToMatch": 16384, "lruCapacityPerServer": 31250}}
ONE: dict[str, Any] = {"decode-filter": {}, "max-score-picker": {}, "single-profile-handler": {}}
DECIDER = {"prefix-based-pd-decider": {"nonCachedTokens": 16}}
SPLIT: dict[str, Any] = {
    **{kind: {} for kind in ("queue-scorer", "prefill-filter", "decode-filter", "max-score-picker")},
    **DECIDER,
    "disagg-profile-handler": {"deciders": {"prefill": "prefix-based-pd-decider"}},
}
BOTH = {
    stage: {f"{stage}-filter": None, "max-score-picker": None, "prefix-cache-scorer": 2, "queue-scorer": 1}
    for stage in ("prefill", "decode")
}
PAIR: dict[str, Any] = {
    **{kind: {} for kind in ("prefill-filter", "decode-filter", "active-request-scorer", "max-score-picker")},
    **{kind: {} for kind in ("inflight-load-producer", "always-disagg-pd-decider")},
    "token-load-scorer": {"inFlightLoadProducerName": "inflight-load-producer"},
    "approx-prefix-cache-producer": {"maxPrefixTokensToMatch": 131072},
    "prefix-cache-affinity-filter": {"peakPrefillThroughput": 33821},
    "disagg-profile-handler": {"deciders": {"prefill": "always-disagg-pd-decider"}},
}
OF_PAIR = {
    "prefill": {"prefill-filter": None, "prefix-cache-affinity-filter": None, "token-load-scorer": None},
    "decode": {"decode-filter": None, "active-request-scorer": None, "max-score-picker": None},
}
SOURCES = {
    "sources": [
        {"pluginRef": "metrics-data-source", "extractors": [{"pluginRef": "core-metrics-extractor"}]},
        {"pluginRef": "endpoint-notification-source", "extractors": [{"pluginRef": "precise-prefix-cache-producer"}]},
    ]
}


@dataclass(frozen=True)
class File:
    """One configuration: the parameters of each plugin, the weight of each in a profile (None: none is given)."""

    plugins: Mapping[str, Any]
    profiles: Mapping[str, Mapping[str, float | None]]
    api: str = CURRENT
    more: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        plugins = [
            {"type": kind} | ({"parameters": parameters} if parameters else {})
            for kind, parameters in self.plugins.items()
        ]
        profiles = [
            {
                "name": name,
                "plugins": [{"pluginRef": ref} | ({"weight": w} if w else {}) for ref, w in plugins_of.items()],
            }
            for name, plugins_of in self.profiles.items()
        ]
        head = {"apiVersion": self.api, "kind": "EndpointPickerConfig"} | dict(self.more)
        return yaml.safe_dump(head | {"plugins": plugins, "schedulingProfiles": profiles}, sort_keys=False)


def _one_profile(scorers: Mapping[str, float], **more: Any) -> dict[str, Any]:
    return {"default": {"decode-filter": None, "max-score-picker": None, **scorers}}


PREFIX: dict[str, Any] = {"prefix-cache-scorer": {}}
LOADED: dict[str, tuple[File, tuple[str, ...]]] = {
    "the smallest one": (File({**PREFIX, **ONE}, _one_profile({"prefix-cache-scorer": 2})), ()),
    "estimated caches and load": (
        File(
            {**PREFIX, "load-aware-scorer": {}, **ONE}, _one_profile({"prefix-cache-scorer": 1, "load-aware-scorer": 1})
        ),
        (),
    ),
    "an approximate producer": (
        File({**APPROXIMATE, **PREFIX, **ONE}, _one_profile({"prefix-cache-scorer": 2})),
        ("approx-prefix-cache-producer",),
    ),
    "an index fed by events": (
        File({**FED_BY_EVENTS, "prefix-cache-scorer": PRECISE, **ONE}, _one_profile({"prefix-cache-scorer": 10})),
        ("token-producer", "precise-prefix-cache-producer", "prefixMatchInfoProducerName"),
    ),
    "an index fed by a data layer": (
        File(
            {
                **FED_BY_EVENTS,
                **FED_BY_DATA,
                "prefix-cache-scorer": PRECISE,
                "kv-cache-utilization-scorer": {},
                "queue-scorer": {},
                **ONE,
            },
            _one_profile({"prefix-cache-scorer": 2, "kv-cache-utilization-scorer": 1, "queue-scorer": 1}),
            more={"dataLayer": SOURCES},
        ),
        ("token-producer", "precise-prefix-cache-producer", "prefixMatchInfoProducerName", "dataLayer changes nothing"),
    ),
    "cold requests spread": (
        File(
            {
                "precise-prefix-cache-producer": {"tokenProcessorConfig": {"blockSizeTokens": 5}},
                "prefix-cache-scorer": PRECISE,
                "no-hit-lru-scorer": {"lruSize": 2048},
                **ONE,
            },
            _one_profile({"prefix-cache-scorer": 2, "no-hit-lru-scorer": 1}),
        ),
        ("precise-prefix-cache-producer", "prefixMatchInfoProducerName", "lruSize"),
    ),
    "P/D": (File({**APPROXIMATE, **PREFIX, **SPLIT}, BOTH), ("approx-prefix-cache-producer",)),
    "P/D of the guides": (File(PAIR, OF_PAIR), ("inFlightLoadProducerName", "approx-prefix-cache-producer")),
    "P/D of the guides, apiVersion v1": (
        File(PAIR, OF_PAIR, NEXT),
        ("inFlightLoadProducerName", "approx-prefix-cache-producer"),
    ),
    "P/D of llm-d-inference-scheduler, without the gate": (
        File(
            {"disagg-headers-handler": {}, "prefix-cache-scorer": {"blockSizeTokens": 16, "autoTune": False}, **SPLIT},
            BOTH,
            OLD,
        ),
        ("blockSizeTokens", "autoTune"),
    ),
    "the precise scorer's older name": (
        File(
            {"precise-prefix-cache-scorer": {"indexerConfig": INDEX}, **ONE},
            _one_profile({"precise-prefix-cache-scorer": 2}),
            OLD,
        ),
        ("indexerConfig",),
    ),
}

ENCODE = "always-disagg-multimodal-decider"
REFUSED: dict[str, tuple[File, str]] = {
    "data parallel": (
        File(
            {**PREFIX, **ONE, "data-parallel-profile-handler": {"primaryPort": 8000}},
            _one_profile({"prefix-cache-scorer": 2}),
        ),
        "type data-parallel-profile-handler is unknown",
    ),
    "a burst's own producer": (
        File(
            {"burst-prefix-cache-producer": {"windowDurationMs": 100}, **PREFIX, **ONE},
            _one_profile({"prefix-cache-scorer": 2}),
        ),
        "type burst-prefix-cache-producer is unknown",
    ),
    "embeddings of images": (
        File({**FED_BY_DATA, "mm-embeddings-cache-producer": {"cacheSizeInMB": 2048}, **ONE}, _one_profile({})),
        "type mm-embeddings-cache-producer is unknown",
    ),
    "topology": (
        File({**APPROXIMATE, **PREFIX, "topology-extractor": {}, **SPLIT}, BOTH),
        "type topology-extractor is unknown",
    ),
    "an admitter": (
        File({"probabilistic-admitter": {}, "random-picker": {}}, {"default": {"random-picker": None}}, OLD),
        "type probabilistic-admitter is unknown",
    ),
    "encode, prefill, decode": (
        File({"encode-filter": {}, "always-disagg-multimodal-decider": {}, **SPLIT}, {**BOTH, "encode": {}}),
        f"type {ENCODE} is unknown",
    ),
    "encode by the handler": (
        File({**SPLIT, "disagg-profile-handler": {"deciders": {"encode": "prefix-based-pd-decider"}}}, BOTH),
        "profiles, deciders: decode, prefill",
    ),
    "a GPU's figures": (
        File({"dcgm-data-source": {"port": 9400}, **ONE}, _one_profile({})),
        "type dcgm-data-source is unknown",
    ),
    "programs' fairness": (
        File({"program-aware-fairness": {}, **ONE}, _one_profile({}), OLD, {"featureGates": ["flowControl"]}),
        "type program-aware-fairness is unknown",
    ),
    "flow control": (
        File(
            {**PREFIX, **ONE}, _one_profile({"prefix-cache-scorer": 2}), more={"flowControl": {"enableEviction": True}}
        ),
        "flowControl: unknown key",
    ),
    "endpoints that a data layer finds": (
        File({**PREFIX, **ONE}, _one_profile({}), more={"dataLayer": {"discovery": {"pluginRef": "x"}}}),
        "dataLayer: discovery is not offered",
    ),
    "a data layer of plugins that are not there": (
        File({**PREFIX, **ONE}, _one_profile({}), more={"dataLayer": SOURCES}),
        "dataLayer: pluginRef 'metrics-data-source' names no plugin",
    ),
    "a limit in the handler": (
        File({"pd-profile-handler": {"threshold": 10}}, {"decode": {}, "prefill": {}}, OLD),
        "threshold: unknown parameter",
    ),
}


@pytest.mark.parametrize(("file", "warned"), LOADED.values(), ids=LOADED)
def test_shipped_files_load_with_warnings_for_settings_without_effect(file: File, warned: tuple[str, ...]) -> None:
    warnings = load(file.text(), name="epp.yaml").warnings
    assert len(warnings) == len(warned), warnings
    for part in warned:
        assert sum(part in warning for warning in warnings) >= 1, (part, warnings)


@pytest.mark.parametrize(("file", "says"), REFUSED.values(), ids=REFUSED)
def test_unsupported_features_are_rejected_by_name(file: File, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"epp\.yaml: .*{says}"):
        load(file.text(), name="epp.yaml")


def _splits(picker: EndpointPicker, num_tokens: int, *, cached: int = 0) -> bool:
    decode = Endpoint("d", {ROLE_LABEL: "decode"}, num_matched_blocks=cached)
    prefill = Endpoint("p", {ROLE_LABEL: "prefill"})
    return picker.pick_prefill([decode, prefill], PickRequest(num_tokens), decode)[0] is not None


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("P/D", (False, True, True)),
        ("P/D of llm-d-inference-scheduler, without the gate", (False, True, True)),
        ("P/D of the guides, apiVersion v1", (True, True, True)),
    ],
)
def test_limit_counts_from_the_uncached_tokens_in_every_apiversion(name: str, split: tuple[bool, ...]) -> None:
    picker = load(LOADED[name][0].text(), name="x")
    assert tuple(_splits(picker, num_tokens) for num_tokens in (15, 16, 17)) == split


def test_precise_scorer_scores_by_the_cached_share() -> None:
    picker = load(LOADED["the precise scorer's older name"][0].text(), name="x")
    cold, warm = (Endpoint(name, num_matched_blocks=cached) for name, cached in (("cold", 1), ("warm", 9)))
    assert picker.profiles["default"].scores([cold, warm], PickRequest(10)) == [0.2, 1.8]


FILE = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: decode-filter
- type: load-aware-scorer
  parameters:
    threshold: 5
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: decode-filter
  - pluginRef: max-score-picker
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("threshold: 5", "threshold: 0", "plugins: load-aware-scorer: threshold: above 0"),
        ("threshold: 5", "limit: 5", "plugins: load-aware-scorer: limit: unknown parameter"),
        ("- type: max-score-picker", "- type: max", "plugins: max: type max is unknown"),
        ("- type: max-score-picker", "- name: max", "plugins: each has a type"),
        ("  - pluginRef: max-score-picker", "  - pluginRef: x", "schedulingProfiles: default: pluginRef 'x'"),
        ("- name: default", "- weight: 1", "schedulingProfiles: each has a name"),
        ("llm-d.ai/v1alpha1", "llm-d.ai/v9", "apiVersion: one of"),
        ("kind: EndpointPickerConfig", "kind: Pod", "kind: EndpointPickerConfig is expected"),
        ("schedulingProfiles:", "profiles:", "profiles: unknown key"),
        ("    threshold: 5", "    threshold: [5", "not YAML: "),
        ("plugins:\n- type: d", "plugins: 5\nx:\n- type: d", "x: unknown key"),
        ("    threshold: 5", "    threshold: \x01", "not YAML: "),
    ],
)
def test_error_names_its_key_in_one_line(old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(FILE.replace(old, new, 1), name="epp.yaml")
    assert str(caught.value).startswith(f"epp.yaml: {says}")
    assert "\n" not in str(caught.value)
