"""Deciders, whole cycles and configuration files against llm-d's own cases."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.config import load_mapping
from prfaas.errors import ConfigError
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.scheduler.endpoint_picker.config import load
from prfaas.scheduler.endpoint_picker.parameters import PrefixDecider
from prfaas.scheduler.endpoint_picker.picker import EndpointPicker, SchedulingProfile
from prfaas.scheduler.endpoint_picker.plugins import FILTERS, ROLE_LABEL, SCORERS, Endpoint
from tests.unit.scheduler.endpoint_picker.conformance import (
    CASES,
    DATA,
    Case,
    answered,
    cases,
    check,
    different,
    refused_cases,
    refused_way,
)

MINIMAL = (DATA / "llmd-minimal.yaml").read_text()
CURRENT = "llm-d.ai/v1alpha1"
DECIDERS = ("prefix-based-pd-decider", "always-disagg-pd-decider")
# llm-d's cases name settings of its sidecar; ours has none of them.
SIDECAR_SETTINGS = {
    "sidecar.other-connectors": "protocol",
    "sidecar.moriio": "moriio_write_mode",
    "sidecar.prefill-header": "enable_prefiller_sampling",
    "sidecar.nixlv2": "prefill_max_retries",
    "sidecar.encode": "ec_connector",
}


def _text(**fields: Any) -> str:
    return yaml.safe_dump({"apiVersion": CURRENT, "kind": "EndpointPickerConfig", **fields}, sort_keys=False)


def _config(plugins: list[Any], profiles: list[Any] | None = None) -> EndpointPicker:
    fields = {"plugins": plugins} | ({"schedulingProfiles": profiles} if profiles else {})
    return load(_text(**fields), name="epp.yaml")


def test_every_case_is_run_and_the_docs_count_them() -> None:
    here, routers = DATA.parent / "unit/scheduler/endpoint_picker", DATA.parent / "integration/router"
    modules = [here / "test_plugins.py", here / "test_picking.py"]
    modules += [routers / "test_sidecar.py", routers / "test_ext_proc.py"]
    text = "".join(module.read_text() for module in modules)
    assert [case for case in answered() if f'"{case["group"]}"' not in text] == []
    num_refused = len(CASES) - len(answered()) - len(different())
    page = (Path(__file__).parents[4] / "docs/gateway.md").read_text()
    rows = [line.split("|")[2:5] for line in page.splitlines() if line.startswith("| ") and line.count("|") == 6]
    counts = [[int(cell) for cell in row] for row in rows if row[0].strip().isdigit()]
    assert [sum(column) for column in zip(*counts, strict=True)] == [len(answered()), num_refused, len(different())]


@refused_cases("plugin", "parameter", "section")
def test_what_prfaas_does_not_offer_is_refused_by_name(case: Case) -> None:
    given, name = case["given"], case["group"].removeprefix("scorer.").removeprefix("filter.").removesuffix(".range")
    if refused_way(case) == "section":
        text, named = _text(**given), case["id"]
    elif refused_way(case) == "plugin":
        named = given.get("type") or (case["id"] if name == "role-filters" else name)
        text = _text(plugins=[{"type": named}])
    else:
        kind = name.removesuffix(".config")
        text, named = _text(plugins=[{"type": kind, "parameters": given["parameters"]}]), case["id"].split()[0]
    with pytest.raises(ConfigError, match=named):
        load(text, name="epp.yaml")


@refused_cases("sidecar")
def test_settings_that_the_sidecar_lacks_are_refused_by_name(case: Case) -> None:
    name = SIDECAR_SETTINGS[case["group"]]
    value = case["given"].get("connector", case["id"]) if name == "protocol" else "x"
    with pytest.raises(ConfigError, match=name):
        load_mapping(SidecarConfig, {name: value}, where="sidecar.yaml")


def _parameters(kind: str, given: Any, *more: Any) -> dict[str, Any]:
    """Return whether the loader accepts a plugin's parameters, and their values."""
    try:
        picker = _config([{"type": kind, "parameters": given}, *more])
    except ConfigError as error:
        return {"valid": False, "error": str(error).replace(kind, "")}
    profile = picker.profiles["default"]
    read: list[Any] = [plugin[1] for plugin in (*profile.filters, *profile.scorers)]
    return {"valid": True} | ({name: getattr(read[0], name) for name in read[0].__struct_fields__} if read else {})


@cases(
    "by-label.config",
    "label-selector-filter.config",
    "prefix-cache-affinity-filter.config",
    "scorer.prefix-cache-scorer.config",
)
def test_parameters_are_accepted_and_rejected_as_in_llm_d(case: Case) -> None:
    kind = case["group"].removesuffix(".config").removeprefix("scorer.")
    check(case, _parameters(kind, case["given"]["parameters"]))


@cases("prefix-based-pd-decider")
def test_prefix_based_decider(case: Case) -> None:
    given = dict(case["given"])
    if "valid" in case["expect"]:
        raw = given["parameters"] if "parameters" in given else yaml.safe_load(given["parameters_raw"])
        check(case, _handler("disagg-profile-handler", {"deciders": {"prefill": DECIDERS[0]}}, decider=raw))
        return
    num_tokens, block_tokens = given.pop("input_tokens"), given.pop("block_size_tokens", 1)
    cached_blocks = given.pop("cached_blocks_on_decode", given.pop("prefix_info", None))
    cached = None if cached_blocks is None else cached_blocks * block_tokens
    picker = _pd(given)
    check(case, {"disaggregate": _stages(picker, _pair(cached), num_tokens)[1] is not None})


@cases("always-disagg-pd-decider")
def test_always_disagg_decider(case: Case) -> None:
    picker = _pd({}, decider=DECIDERS[1])
    check(case, {"disaggregate": _stages(picker, _pair(None), 1)[1] is not None})


def _pd(
    parameters: dict[str, Any],
    *,
    decider: str = DECIDERS[0],
    decode: dict[str, float] | None = None,
    prefill: dict[str, float] | None = None,
) -> EndpointPicker:
    """Return the picker of two profiles with scorers by weight, and of a decider."""
    stages = {"decode": decode or {"load-aware-scorer": 1}, "prefill": prefill or {"prefix-cache-scorer": 50}}
    profiles = [
        {
            "name": name,
            "plugins": [
                {"pluginRef": f"{name}-filter"},
                *({"pluginRef": scorer, "weight": weight} for scorer, weight in scorers.items()),
            ],
        }
        for name, scorers in stages.items()
    ]
    kinds = ("decode-filter", "prefill-filter", "load-aware-scorer", "prefix-cache-scorer", "max-score-picker")
    handler = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": decider}}}
    deciding = {"type": decider, "parameters": parameters}
    return _config([*({"type": kind} for kind in kinds), deciding, handler], profiles)


def _pair(cached: int | None) -> list[Endpoint]:
    return [Endpoint("d", {ROLE_LABEL: "decode"}, num_cached_tokens=cached), Endpoint("p", {ROLE_LABEL: "prefill"})]


def _stages(picker: EndpointPicker, endpoints: list[Endpoint], num_tokens: int) -> tuple[str | None, str | None]:
    """Return the names of the endpoints that decode and prefill; None without one."""
    decode = picker.pick_decode(endpoints, num_tokens)
    if not decode:
        return None, None
    prefill, _ = picker.pick_prefill(endpoints, num_tokens, decode[0])
    return decode[0].name, prefill.name if prefill else None


@cases("disagg-profile-handler.pick")
def test_next_stage_of_a_cycle(case: Case) -> None:
    given = case["given"]
    picker = _pd({"nonCachedTokens": given["nonCachedTokens"]})
    if given["ran"] == []:
        check(case, {"run_next": [picker.decode_profile]})
        return
    endpoints = _pair(given.get("cached_tokens", 0)) if given["ran"] == ["decode"] else []
    prefill = _stages(picker, endpoints, given.get("input_tokens", 0))[1]
    check(case, {"run_next": ["prefill"] if prefill else []})


@cases("disagg-profile-handler.series")
def test_stages_of_two_requests(case: Case) -> None:
    given = case["given"]
    picker = _pd({"nonCachedTokens": given["nonCachedTokens"]})
    first = given["first_prompt_characters"] // given["characters_per_token"]
    second = first * (2 if given["second"] == "doubled" else 1)
    ran = [_stages(picker, _pair(cached), n)[1] for n, cached in ((first, 0), (second, first))]
    check(case, {"run_next": [["prefill"] if prefill else [] for prefill in ran]})


@cases("disagg-profile-handler.process-results")
def test_result_of_a_cycle(case: Case) -> None:
    endpoints = _pair(0) if "prefill" in case["given"]["results"] else []
    names = _stages(_pd({"nonCachedTokens": 1}), endpoints, 8)
    profiles = [profile for profile, name in zip(("decode", "prefill"), names, strict=True) if name]
    check(case, {"primary": profiles[0] if profiles else None, "profiles": profiles})


@cases("schedule.pd")
def test_whole_cycles(case: Case) -> None:
    given = case["given"]
    num_tokens = given["prompt_characters"] // given["characters_per_token"]
    limit = {"nonCachedTokens": given["nonCachedTokens"]}
    picker = _pd(limit, decode=given["decode_scorers"], prefill=given["prefill_scorers"])

    def placed(cached: int) -> dict[str, str]:
        endpoints = [_described(text, cached=cached) for text in given["endpoints"]]
        names = _stages(picker, endpoints, num_tokens)
        return {stage: name for stage, name in zip(("decode", "prefill"), names, strict=True) if name}

    check(case, {"first": placed(0), "again_with_whole_prompt_cached": placed(num_tokens)})


def _described(text: str, *, cached: int) -> Endpoint:
    name, _, rest = text.partition(": ")
    role, _, queue = rest.partition(", queue ")
    labels = {ROLE_LABEL: role.removeprefix("role ")} if role.startswith("role ") else {}
    return Endpoint(name, labels, num_waiting=int(queue), num_cached_tokens=cached)


_SOME = {"nonCachedTokens": 7}


def _handler(kind: str, given: Any, *, decider: Any = _SOME) -> dict[str, Any]:
    """Return whether the loader accepts a handler's parameters, and which profiles and decider they choose."""
    parameters = {DECIDERS[0]: decider, DECIDERS[1]: None}
    deciders = [{"type": name, "parameters": values} for name, values in parameters.items()]
    profiles: list[Any] = [{"name": name, "plugins": []} for name in ("decode", "prefill", "my-decode", "my-prefill")]
    try:
        picker = _config([{"type": kind, "parameters": given}, *deciders], profiles)
    except ConfigError as error:
        return {"valid": False, "error": str(error).replace(kind, "")}
    assert picker.decider is not None
    prefix = picker.decider.prefix
    names = {None: DECIDERS[1], PrefixDecider(): None}
    return {
        "valid": True,
        "decode": picker.decode_profile,
        "prefill": picker.prefill_profile,
        "decider": names.get(prefix, DECIDERS[0]),
        "nonCachedTokens": prefix.nonCachedTokens if prefix else None,
    }


@cases("disagg-profile-handler.config", "pd-profile-handler.config")
def test_parameters_of_profile_handlers(case: Case) -> None:
    check(case, _handler(case["group"].removesuffix(".config"), case["given"]["parameters"]))


_KINDS = {function: kind for kind, (_, function) in (FILTERS | SCORERS).items()}


def _summary(profile: SchedulingProfile) -> dict[str, Any]:
    return {
        "filters": [_KINDS[keep] for keep, _ in profile.filters],
        "scorers": {_KINDS[score]: weight for score, _, weight in profile.scorers},
        "endpoints": profile.max_endpoints,
    }


@cases("config-loader")
def test_config_loader(case: Case) -> None:
    text = case["given"]["text"] if "text" in case["given"] else _text(**case["given"])
    try:
        picker = load(text, name="epp.yaml")
    except ConfigError as error:
        check(case, {"error": str(error)})
        return
    gates = [warning.split()[1] for warning in picker.warnings if warning.startswith("featureGates")]
    check(
        case,
        {
            "profiles": {name: _summary(profile) for name, profile in picker.profiles.items()},
            "gates": gates,
            "decode": picker.decode_profile,
            "prefill": picker.prefill_profile,
        },
    )


@pytest.mark.parametrize(("num_tokens", "splits"), [(7, False), (8, True)])
def test_file_of_the_earlier_project_loads_and_follows_todays_rule(num_tokens: int, splits: bool) -> None:
    picker = load(MINIMAL, name="minimal.yaml")
    assert picker.warnings[0].startswith("featureGates: prepareDataPlugins changes nothing")
    endpoints = [Endpoint("d", {"role": "decode"}, num_cached_tokens=0), Endpoint("p", {"role": "prefill"})]
    assert _stages(picker, endpoints, num_tokens) == ("d", "p" if splits else None)


def test_default_plugins_prefer_the_warm_endpoint_until_it_is_far_behind() -> None:
    kinds = ("prefix-cache-affinity-filter", "token-load-scorer", "max-score-picker")
    picker = _config([{"type": kind} for kind in kinds])
    for in_flight, name in ((100_000, "warm"), (300_000, "idle")):
        endpoints = [
            Endpoint("idle", num_cached_tokens=0, num_in_flight_tokens=0),
            Endpoint("warm", num_cached_tokens=90, num_in_flight_tokens=in_flight),
        ]
        assert picker.pick_decode(endpoints, 100)[0].name == name
