import tracemalloc
from dataclasses import replace
from itertools import pairwise

from prfaas.manager.dashboard.feed import SAMPLES, Change, History, PathPoint, Sample, changes

CALM = PathPoint(1e6, 2e6, 100, 1.0, "", is_down=False)
BEFORE = Sample(
    at=1.0,
    threshold_tokens=100,
    plan_version=1,
    plan_limit="link",
    plan_cause="first plan",
    paths={"east → west": CALM},
    roles={"i1": "prefill", "i2": "decode"},
    draining={},
    nodes={"n1": "west"},
)


def told(now: Sample) -> list[tuple[str, str, str]]:
    return [(change.kind, change.subject, change.detail) for change in changes(BEFORE, now)]


def test_moving_figures_are_no_change() -> None:
    moved = replace(CALM, bytes_per_second=2e6)
    assert told(replace(BEFORE, at=2.0, paths={"east → west": moved})) == []


def test_an_instance_that_is_silent_or_answers_again_is_a_change() -> None:
    silent = replace(BEFORE, silent=frozenset({"i1", "gone"}))
    assert told(silent) == [("silent", name, "gets no new requests") for name in ("gone", "i1")]
    assert [(change.kind, change.subject, change.detail) for change in changes(silent, BEFORE)] == [
        ("answers", "gone", "its node has left"),
        ("answers", "i1", "gets requests again"),
    ]


def test_new_plan_names_the_limiting_stage() -> None:
    assert told(
        replace(BEFORE, plan_version=2, threshold_tokens=2000, plan_limit="pd-decode", plan_cause="instances changed")
    ) == [("plan", "plan 2", "instances changed; with more load decode fills first")]


def test_path_change_names_its_cause() -> None:
    raised = replace(CALM, multiplier=1.5, threshold_tokens=150, reason="link queue 1.8 s")
    (rise,) = changes(BEFORE, replace(BEFORE, at=2.0, paths={"east → west": raised}))
    assert rise == Change(2.0, "congestion", "east → west", "link queue 1.8 s", (100, 150))
    down = replace(CALM, is_down=True)
    assert told(replace(BEFORE, paths={"east → west": down})) == [("link_down", "east → west", "no connection")]
    back = list(changes(replace(BEFORE, paths={"east → west": raised}), BEFORE))
    assert [(change.kind, change.thresholds) for change in back] == [("calm", (150, 100))]


def test_congestion_ends_with_its_last_step() -> None:
    higher, lower = (replace(CALM, multiplier=times, threshold_tokens=round(100 * times)) for times in (4.0, 2.0))
    samples = [replace(BEFORE, paths={"east → west": path}) for path in (higher, lower, CALM)]
    steps = [change for pair in pairwise(samples) for change in changes(*pair)]
    assert [(change.kind, change.thresholds) for change in steps] == [("congestion", (400, 200)), ("calm", (200, 100))]


def test_step_of_a_path_leaves_out_a_plan_of_the_same_moment() -> None:
    raised = replace(CALM, multiplier=2.0, threshold_tokens=600)
    now = replace(BEFORE, threshold_tokens=300, paths={"east → west": raised})
    assert [(change.kind, change.thresholds) for change in changes(BEFORE, now)] == [
        ("plan", (100, 300)),
        ("congestion", (300, 600)),
    ]


def test_incidents_of_a_path_end_when_its_nodes_leave() -> None:
    raised = replace(CALM, multiplier=2.0, threshold_tokens=200, is_down=True)
    left = changes(replace(BEFORE, paths={"east → west": raised}), replace(BEFORE, paths={}))
    assert [(change.kind, change.thresholds) for change in left] == [("calm", (200, 100)), ("link_up", None)]


def test_each_role_and_node_is_a_change_of_its_own() -> None:
    now = replace(BEFORE, roles={"i1": "decode", "i2": "decode"}, draining={"i2": "prefill"}, nodes={"n2": "east"})
    assert told(now) == [
        ("role_draining", "i2", "will become prefill"),
        ("role_changed", "i1", "prefill → decode"),
        ("node_joined", "n2", "in east"),
        ("node_left", "n1", "from west"),
    ]


def test_restart_drain_and_lost_record_are_changes() -> None:
    before = replace(BEFORE, epochs={"n1": 1})
    now = replace(BEFORE, epochs={"n1": 2}, leaving=frozenset({"n1"}), is_stale=True)
    assert [change.kind for change in changes(before, now)] == ["node_restarted", "node_draining", "record_lost"]
    assert [change.kind for change in changes(now, replace(BEFORE, epochs={"n1": 2}))] == [
        "node_drained",
        "record_found",
    ]


def test_latest_samples_stay_and_newest_change_is_first() -> None:
    history = History()
    for number in range(SAMPLES + 5):
        history.add(replace(BEFORE, at=float(number), threshold_tokens=number))
    assert history.steps(0, SAMPLES + 5, num_steps=SAMPLES + 5)["threshold_tokens"][:6] == [None] * 5 + [5]
    assert history.changes()[0].thresholds == (SAMPLES + 3, SAMPLES + 4)


def test_step_has_the_mean_rate_and_no_capacity_below_it() -> None:
    history = History()
    for number, rate in enumerate((1e6, 5e6)):
        history.add(replace(BEFORE, at=float(number), paths={"east → west": replace(CALM, bytes_per_second=rate)}))
    assert history.steps(0, 4, num_steps=2)["paths"] == {"east → west": [(3e6, 3e6, 100), None]}


def test_step_of_unknown_capacity_is_not_full() -> None:
    history = History()
    history.add(replace(BEFORE, paths={"east → west": replace(CALM, capacity_bytes_per_second=0.0)}))
    assert history.steps(0, 2, num_steps=1)["paths"] == {"east → west": [(1e6, 0.0, 100)]}


def test_an_hour_with_fifty_instances_needs_little_memory() -> None:
    history = History()
    tracemalloc.start()
    for number in range(SAMPLES):
        roles = {f"i{instance}": "decode" for instance in range(50)}
        history.add(replace(BEFORE, at=float(number), roles=roles, paths={"east → west": replace(CALM)}))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 3e6
