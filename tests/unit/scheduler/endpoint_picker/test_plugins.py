"""Filters, scorers and the picker against llm-d's own cases."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.endpoint_picker.parameters import read
from prfaas.scheduler.endpoint_picker.picker import SchedulingProfile, max_score
from prfaas.scheduler.endpoint_picker.plugins import FILTERS, ROLE_LABEL, SCORERS, Endpoint
from tests.unit.scheduler.endpoint_picker.conformance import PODS, Case, cases, check

ANY = 0


def _keep(kind: str, parameters: dict[str, Any], endpoints: list[Endpoint], num_tokens: int = ANY) -> list[str]:
    cls, keep = FILTERS[kind]
    return [endpoint.name for endpoint in keep(endpoints, num_tokens, read(kind, cls, parameters))]


def _score(
    kind: str, endpoints: list[Endpoint], num_tokens: int = ANY, parameters: dict[str, Any] | None = None
) -> list[float]:
    cls, score = SCORERS[kind]
    return score(endpoints, num_tokens, read(kind, cls, parameters))


@cases("by-label.filter", "label-selector-filter")
def test_label_filters(case: Case) -> None:
    given = case["given"]
    pods = given["endpoints"] if isinstance(given["endpoints"], dict) else dict(PODS)
    if str(given["endpoints"]).endswith("without no-tier-pod"):
        pods = {name: labels for name, labels in pods.items() if name != "no-tier-pod"}
    endpoints = [Endpoint(name, labels) for name, labels in pods.items()]
    kind = "by-label" if case["group"].startswith("by-label") else "label-selector-filter"
    check(case, {"keep": _keep(kind, given["parameters"], endpoints)})


@cases("role-filters")
def test_role_filters(case: Case) -> None:
    roles = case["given"]["endpoints"].items()
    endpoints = [Endpoint(name, {ROLE_LABEL: role} if role else {}) for name, role in roles]
    check(case, {"keep": _keep(case["id"], {}, endpoints)})


def test_unlabelled_pod_decodes() -> None:
    endpoints = [Endpoint("none"), Endpoint("p", {ROLE_LABEL: "prefill"})]
    assert _keep("decode-filter", {}, endpoints) == ["none"]


@cases("prefix-cache-affinity-filter")
def test_prefix_cache_affinity_filter(case: Case) -> None:
    endpoints = [
        Endpoint(
            fields["name"], num_cached_tokens=fields["match_of_100"], num_in_flight_tokens=fields["in_flight_tokens"]
        )
        for fields in case["given"]["endpoints"]
    ]
    kept = _keep("prefix-cache-affinity-filter", case["given"]["parameters"], endpoints, 100)
    check(case, {"keep": kept})


def test_warm_endpoint_that_is_too_slow_loses_its_preference() -> None:
    endpoints = [
        Endpoint("warm", num_cached_tokens=90, num_in_flight_tokens=300_000),
        Endpoint("idle", num_cached_tokens=0, num_in_flight_tokens=0),
    ]
    assert _keep("prefix-cache-affinity-filter", {}, endpoints, 100) == ["warm", "idle"]


@cases("max-score-picker")
def test_max_score_picker(case: Case) -> None:
    scores = case["given"]["scores"]
    picked = max_score([Endpoint(name) for name in scores], list(scores.values()), case["given"]["maxNumOfEndpoints"])
    # Equal scores may come in any order.
    check(case, {"picked": sorted((endpoint.name for endpoint in picked), key=lambda name: (-scores[name], name))})


_FIGURES = {"waiting": "num_waiting", "running": "num_running", "utilization": "kv_usage_ratio"}


@cases(
    "scorer.load-aware-scorer",
    "scorer.queue-scorer",
    "scorer.running-requests-size-scorer",
    "scorer.kv-cache-utilization-scorer",
    "scorer.active-request-scorer",
    "scorer.token-load-scorer",
    "scorer.prefix-cache-scorer",
)
def test_scorers_of_one_figure(case: Case) -> None:
    fields = {
        **_FIGURES,
        "in_flight": "num_in_flight",
        "in_flight_tokens": "num_in_flight_tokens",
        "matched": "num_cached_tokens",
    }
    given = dict(case["given"])
    num_tokens = given.pop("total", 0)
    name = next(name for name in given if name in fields)
    endpoints = [Endpoint("", **{fields[name]: value}) for value in given.pop(name)]
    kind = case["group"].removeprefix("scorer.")
    check(case, {"scores": _score(kind, endpoints, num_tokens, given)})


@cases("scorer.no-hit-lru-scorer")
def test_no_hit_lru_scorer(case: Case) -> None:
    times = {"never": None, "older": 1.0, "newest": 2.0}
    uses = case["given"].get("last_cold_use", ["never"] * len(case["given"]["cached"]))
    endpoints = [
        Endpoint("", num_cached_tokens=cached, last_cold_use=times[use])
        for cached, use in zip(case["given"]["cached"], uses, strict=True)
    ]
    check(case, {"scores": _score("no-hit-lru-scorer", endpoints, 10)})


@cases("profile")
def test_profile(case: Case) -> None:
    raw, weight = case["given"]["raw_scores"], case["given"]["weight"]
    profile = SchedulingProfile("", scorers=((lambda endpoints, num_tokens, parameters: raw, None, weight),))
    check(case, {"weighted": profile.scores([Endpoint(str(score)) for score in raw], ANY)})


endpoints = st.builds(
    Endpoint,
    st.text(max_size=3),
    st.just({}),
    st.integers(0, 500),
    st.integers(0, 500),
    st.floats(0, 1),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(0, 10**7),
    st.none() | st.floats(0, 100),
)


@given(st.sampled_from(sorted(SCORERS)), st.lists(endpoints, max_size=5))
def test_every_scorer_scores_every_endpoint_within_zero_and_one(kind: str, given: list[Endpoint]) -> None:
    scores = _score(kind, given, 1600)
    assert len(scores) == len(given) and all(0 <= score <= 1 for score in scores)


@given(st.lists(endpoints, max_size=5, unique_by=lambda endpoint: endpoint.name))
def test_affinity_filter_always_leaves_an_endpoint(given: list[Endpoint]) -> None:
    kept = _keep("prefix-cache-affinity-filter", {}, given, 1600)
    assert bool(kept) == bool(given) and set(kept) <= {endpoint.name for endpoint in given}
