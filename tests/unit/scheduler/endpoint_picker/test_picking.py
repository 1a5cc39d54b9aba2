"""Deciders, whole cycles and configuration files against llm-d's own cases."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from prfaas.errors import ConfigError
from prfaas.scheduler.endpoint_picker.config import load
from prfaas.scheduler.endpoint_picker.parameters import PrefixDecider, read
from prfaas.scheduler.endpoint_picker.picker import Decider, EndpointPicker
from prfaas.scheduler.endpoint_picker.plugins import ROLE_LABEL, Endpoint, PickRequest
from tests.unit.scheduler.endpoint_picker.conformance import CASES, DATA, NOT_OFFERED, cases

MINIMAL = (DATA / "llmd-minimal.yaml").read_text()
CURRENT = "llm-d.ai/v1alpha1"


def _config(plugins: list[Any], profiles: list[Any] | None = None, **fields: Any) -> EndpointPicker:
    whole = {"apiVersion": CURRENT, "kind": "EndpointPickerConfig", "plugins": plugins, **fields}
    return load(yaml.safe_dump(whole | ({"schedulingProfiles": profiles} if profiles else {})), name="epp.yaml")


def test_every_case_runs_or_has_a_reason_not_to() -> None:
    run = set()
    here, routers = DATA.parent / "unit/scheduler/endpoint_picker", DATA.parent / "integration/router"
    modules = (here / "test_plugins.py", here / "test_picking.py", routers / "test_sidecar.py")
    for module in (*modules, routers / "test_ext_proc.py"):
        text = module.read_text()
        run |= {case["group"] for case in CASES if f'"{case["group"]}"' in text}
    assert run | set(NOT_OFFERED) == {case["group"] for case in CASES}
    assert not run & set(NOT_OFFERED)


@cases("prefix-based-pd-decider")
def test_prefix_based_decider(case: dict[str, Any]) -> None:
    given, expected = case["given"], case["expect"]
    if "valid" in expected:
        raw = given["parameters"] if "parameters" in given else given["parameters_raw"]
        if expected["valid"]:
            assert read("prefix-based-pd-decider", PrefixDecider, raw).nonCachedTokens == (raw or {}).get(
                "nonCachedTokens", 0
            )
        else:
            with pytest.raises(ValueError, match="parameters"):
                read("prefix-based-pd-decider", PrefixDecider, raw)
        return
    decode = Endpoint("decode", num_matched_blocks=given.get("cached_blocks_on_decode"))
    parameters = PrefixDecider(given["nonCachedTokens"], given.get("promptTokens", 0))
    request = PickRequest(given["input_tokens"], given.get("block_size_tokens", 1))
    assert Decider(parameters).disaggregates(decode, request)[0] == expected["disaggregate"]


@cases("always-disagg-pd-decider")
def test_always_disagg_decider(case: dict[str, Any]) -> None:
    assert Decider().disaggregates(Endpoint("d"), PickRequest(1)) == (case["expect"]["disaggregate"], "pd")


def _pd(non_cached: int, *, block: int = 1) -> EndpointPicker:
    decode = [{"pluginRef": "decode-filter"}, {"pluginRef": "load-aware-scorer"}]
    prefill = [{"pluginRef": "prefill-filter"}, {"pluginRef": "prefix-cache-scorer", "weight": 50}]
    decider = {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": non_cached}}
    handler = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "prefix-based-pd-decider"}}}
    kinds = ("decode-filter", "prefill-filter", "load-aware-scorer", "prefix-cache-scorer", "max-score-picker")
    profiles = [{"name": "decode", "plugins": decode}, {"name": "prefill", "plugins": prefill}]
    return _config([*({"type": kind} for kind in kinds), decider, handler], profiles)


def _pair(cached: int) -> list[Endpoint]:
    return [
        Endpoint("d", {ROLE_LABEL: "decode"}, num_matched_blocks=cached),
        Endpoint("p", {ROLE_LABEL: "prefill"}),
    ]


@cases("disagg-profile-handler.pick", "disagg-profile-handler.process-results")
def test_stages_of_a_cycle(case: dict[str, Any]) -> None:
    given = case["given"]
    ran = given.get("ran", given.get("results"))
    fails = isinstance(ran, dict)
    endpoints = [] if fails else _pair(given.get("cached_tokens", 0))
    request = PickRequest(given.get("input_tokens", 8))
    decode, prefill = _cycle(_pd(given.get("nonCachedTokens", 1)), endpoints, request)
    if fails:
        assert decode is None
    elif "run_next" in case["expect"]:
        runs_prefill = case["expect"]["run_next"] == ["prefill"]
        assert decode == "d"
        assert (prefill is not None) == runs_prefill or ran == []
    else:
        assert (decode, prefill) == ("d", "p")


@cases("schedule.pd")
def test_whole_cycles(case: dict[str, Any]) -> None:
    given, expected = case["given"], case["expect"]
    num_tokens = given["prompt_characters"] // given["characters_per_token"]
    endpoints = [_described(text) for text in given["endpoints"]]
    picker = _pd(given["nonCachedTokens"])
    assert _cycle(picker, endpoints, PickRequest(num_tokens)) == _expected(expected["first"])
    if "again_with_whole_prompt_cached" in expected:
        warm = [_described(text, cached=num_tokens) for text in given["endpoints"]]
        again = expected["again_with_whole_prompt_cached"]
        assert _cycle(picker, warm, PickRequest(num_tokens)) == _expected(again)


def _described(text: str, *, cached: int = 0) -> Endpoint:
    name, _, rest = text.partition(": ")
    role, _, queue = rest.partition(", queue ")
    labels = {ROLE_LABEL: role.removeprefix("role ")} if role.startswith("role ") else {}
    return Endpoint(name, labels, num_waiting=int(queue), num_matched_blocks=cached)


def _expected(expected: Any) -> tuple[str | None, str | None]:
    return (None, None) if expected == "error" else (expected["decode"], expected.get("prefill"))


def _cycle(picker: EndpointPicker, endpoints: list[Endpoint], request: PickRequest) -> tuple[str | None, str | None]:
    """Who decodes and who prefills in its place, by name, where anybody does."""
    decode = picker.pick_decode(endpoints, request)
    if not decode:
        return None, None
    prefill, _ = picker.pick_prefill(endpoints, request, decode[0])
    return decode[0].name, prefill.name if prefill else None


@cases("by-label.config", "prefix-cache-affinity-filter.config", "scorer.prefix-cache-scorer.config")
def test_parameters_are_accepted_and_rejected_as_in_llm_d(case: dict[str, Any]) -> None:
    kind = case["group"].removesuffix(".config").removeprefix("scorer.")
    parameters = dict(case["given"]["parameters"])
    if "matchLengthScale" in parameters:
        parameters["matchLengthScaleTokens"] = parameters.pop("matchLengthScale")
    plugin = {"type": kind, "parameters": parameters}
    if case["expect"]["valid"]:
        _config([plugin])
    else:
        with pytest.raises(ConfigError, match=rf"epp.yaml: plugins: {kind}: "):
            _config([plugin])


@cases("pd-profile-handler.config")
def test_parameters_of_the_pd_handler(case: dict[str, Any]) -> None:
    handler = {"type": "pd-profile-handler", "parameters": case["given"]["parameters"]}
    profiles = [{"name": "decode", "plugins": []}, {"name": "prefill", "plugins": []}]
    if case["expect"]["valid"]:
        assert _config([handler], profiles).decode_profile == "decode"
    else:
        with pytest.raises(ConfigError, match=r"primaryPort|deciderPluginName"):
            _config([handler], profiles)


QUEUE, PICKER, SINGLE = {"type": "queue-scorer"}, {"type": "max-score-picker"}, {"type": "single-profile-handler"}
ONE = [{"name": "one", "plugins": [{"pluginRef": "queue-scorer"}]}]
LOADER: dict[str, tuple[list[Any], list[Any] | None, dict[str, Any], str]] = {
    "unknown parameter field": ([{"type": "queue-scorer", "parameters": {"x": 1}}], ONE, {}, "unknown field `x`"),
    "invalid parameters": ([{"type": "load-aware-scorer", "parameters": {"threshold": "x"}}], None, {}, "threshold"),
    "two profile handlers": ([SINGLE, {"type": "pd-profile-handler"}, QUEUE], ONE, {}, "two profile handlers"),
    "two profiles with one name": ([QUEUE], ONE * 2, {}, "one appears twice"),
    "unknown plugin type": ([{"type": "magic-scorer"}], None, {}, "magic-scorer is unknown"),
    "pluginRef to nothing": ([QUEUE], [{"name": "one", "plugins": [{"pluginRef": "x"}]}], {}, "'x' names no plugin"),
    "unknown feature gate": ([QUEUE], ONE, {"featureGates": ["magic"]}, "magic is unknown"),
    "two plugins with one name": ([QUEUE, QUEUE], ONE, {}, "queue-scorer appears twice"),
    "two pickers in a profile": (
        [PICKER, {**PICKER, "name": "other"}],
        [{"name": "one", "plugins": [{"pluginRef": "max-score-picker"}, {"pluginRef": "other"}]}],
        {},
        "two pickers",
    ),
    "profile plugin without pluginRef": ([QUEUE], [{"name": "one", "plugins": [{"weight": 1}]}], {}, "pluginRef"),
}


@cases("config-loader")
def test_config_loader(case: dict[str, Any]) -> None:
    name = case["given"]["case"]
    if "error" in case["expect"]:
        plugins, profiles, fields, message = LOADER[name]
        with pytest.raises(ConfigError, match=message):
            _config(plugins, profiles, **fields)
        return
    if name == "no schedulingProfiles":
        profile = _config([QUEUE, {"type": "decode-filter"}, PICKER]).profiles["default"]
        assert (len(profile.filters), len(profile.scorers)) == (1, 1)
    elif name == "one profile, no handler":
        picker, (a, b) = _config([QUEUE], ONE), (Endpoint("a", num_waiting=2), Endpoint("b"))
        assert picker.pick_decode([a, b], PickRequest(9)) == [b]
        assert picker.pick_prefill([a, b], PickRequest(9), b) == (None, "pd_disabled")
    else:
        order = [{"name": "one", "plugins": [{"pluginRef": "max-score-picker"}, {"pluginRef": "queue-scorer"}]}]
        assert len(_config([QUEUE, PICKER], order).profiles["one"].scorers) == 1


@pytest.mark.parametrize(("num_tokens", "splits"), [(7, False), (8, True)])
def test_file_of_the_earlier_project_loads_and_follows_todays_rule(num_tokens: int, splits: bool) -> None:
    picker = load(MINIMAL, name="minimal.yaml")
    assert picker.warnings[0].startswith("featureGates: prepareDataPlugins changes nothing")
    endpoints = [Endpoint("d", {"role": "decode"}, num_matched_blocks=0), Endpoint("p", {"role": "prefill"})]
    assert _cycle(picker, endpoints, PickRequest(num_tokens)) == ("d", "p" if splits else None)


def test_default_plugins_prefer_the_warm_endpoint_until_it_is_far_behind() -> None:
    kinds = ("prefix-cache-affinity-filter", "token-load-scorer", "max-score-picker")
    picker = _config([{"type": kind} for kind in kinds])
    for in_flight, name in ((100_000, "warm"), (300_000, "idle")):
        endpoints = [
            Endpoint("idle", num_matched_blocks=0, num_in_flight_tokens=0),
            Endpoint("warm", num_matched_blocks=90, num_in_flight_tokens=in_flight),
        ]
        assert picker.pick_decode(endpoints, PickRequest(100))[0].name == name
