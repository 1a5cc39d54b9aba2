from __future__ import annotations

from dataclasses import replace

from prfaas.manager.dashboard.feed import SAMPLES, History, PathPoint, Sample, changes

CALM = PathPoint(1e6, 2e6, 100, 1.0, None, is_down=False)
BEFORE = Sample(
    at=1.0,
    threshold_tokens=100,
    plan_version=1,
    plan_limit="link",
    paths={"east → west": CALM},
    counts={"local/short": 3.0},
    answered={},
    ttft={},
    roles={"i1": "prefill", "i2": "decode"},
    draining={},
    nodes={"n1": "west"},
)


def told(now: Sample) -> list[tuple[str, str, str]]:
    return [(change.kind, change.subject, change.detail) for change in changes(BEFORE, now)]


def test_moving_figures_are_no_change() -> None:
    moved = replace(CALM, bytes_per_second=2e6)
    assert told(replace(BEFORE, at=2.0, paths={"east → west": moved}, counts={"local/short": 9.0})) == []


def test_an_instance_that_is_silent_or_answers_again_is_a_change() -> None:
    silent = replace(BEFORE, silent=frozenset({"i1", "gone"}))
    assert told(silent) == [("silent", name, "gets no new requests") for name in ("gone", "i1")]
    assert [(change.kind, change.subject) for change in changes(silent, BEFORE)] == [("answers", "i1")]


def test_new_plan_names_the_limiting_stage() -> None:
    assert told(replace(BEFORE, plan_version=2, threshold_tokens=2000, plan_limit="decode")) == [
        ("plan", "plan 2", "threshold 100 → 2,000 tokens, limited by decode")
    ]


def test_path_change_names_its_cause() -> None:
    raised = replace(CALM, multiplier=1.5, threshold_tokens=150, cause="queue")
    assert told(replace(BEFORE, paths={"east → west": raised})) == [
        ("congestion", "east → west", "threshold 100 → 150 tokens: queue")
    ]
    down = replace(CALM, is_down=True)
    assert told(replace(BEFORE, paths={"east → west": down})) == [("link_down", "east → west", "no connection")]
    back = list(changes(replace(BEFORE, paths={"east → west": raised}), BEFORE))
    assert [(change.kind, change.detail) for change in back] == [("calm", "threshold 150 → 100 tokens")]


def test_each_role_and_node_is_a_change_of_its_own() -> None:
    now = replace(BEFORE, roles={"i1": "decode", "i2": "decode"}, draining={"i2": "prefill"}, nodes={"n2": "east"})
    assert told(now) == [
        ("role_draining", "i2", "will become prefill"),
        ("role_changed", "i1", "prefill → decode"),
        ("node_joined", "n2", "in east"),
        ("node_left", "n1", "from west"),
    ]


def test_latest_samples_stay_and_newest_change_is_first() -> None:
    history = History()
    for number in range(SAMPLES + 5):
        history.add(replace(BEFORE, at=float(number), plan_version=number))
    assert [len(history.drawn()), history.drawn()[0]["at"]] == [SAMPLES, 5.0]
    assert history.changes()[0]["subject"] == f"plan {SAMPLES + 4}"
