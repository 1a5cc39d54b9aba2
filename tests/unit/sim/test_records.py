"""Decisions are made again from their records, whoever wrote them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.manager.routing.decision_log import RecordedDecision
from prfaas.scheduler.route import route
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.sim.replay_log import Recorder, read_records, replay
from prfaas.sim.run import simulate
from prfaas.sim.scenario import Scenario
from prfaas.types import AgentName, ClusterName, InstanceId


@pytest.fixture(scope="module")
def lines() -> str:
    file = io.StringIO()
    simulate(Scenario(fidelity="instances", requests=100), watch=Recorder(file))
    return file.getvalue()


@pytest.mark.parametrize("form", ["lines", "list", "one"])
def test_recorded_decisions_are_repeated(lines: str, form: str, tmp_path: Path) -> None:
    records = [json.loads(line) for line in lines.splitlines()]
    texts = {"lines": lines, "list": json.dumps(records), "one": json.dumps(records[0])}
    path = tmp_path / "decisions"
    path.write_text(texts[form])
    read = read_records(path)
    assert len(read) == (1 if form == "one" else 100)
    assert list(replay(read)) == []


def test_decision_of_a_manager_is_repeated(tmp_path: Path) -> None:
    decode = InstanceState(InstanceId("d1"), ClusterName("west"), "pd", "both", AgentName("d1"))
    prefill = InstanceState(InstanceId("p1"), ClusterName("east"), "prfaas", "prefill", AgentName("p1"))
    snapshot = Snapshot(500, (decode, prefill))
    documents = []
    for num_tokens in (400, 600):
        facts = RequestFacts(num_tokens, cached_tokens={AgentName("d1"): 50})
        documents.append(RecordedDecision(1.0, "m", "t", "s", snapshot, facts, route(snapshot, facts)).document())
    path = tmp_path / "decisions.json"
    path.write_text(json.dumps(documents))
    assert [record["decision"]["reason"] for record in read_records(path)] == ["short", "long"]
    assert list(replay(read_records(path))) == []


def test_changed_decision_is_named(lines: str) -> None:
    records = [json.loads(line) for line in lines.splitlines()]
    records[6]["snapshot"]["threshold_tokens"] = 1 if records[6]["decision"]["reason"] == "pd" else 1 << 40
    (difference,) = replay(records)
    assert difference.position == 7
    assert difference.recorded["reason"] != difference.made["reason"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json", '{"decision": {}}'])
def test_file_without_records_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    path.write_text(text)
    with pytest.raises(ConfigError, match="decisions"):
        read_records(path)


def test_a_record_with_an_unknown_field_is_refused(lines: str) -> None:
    record = json.loads(lines.splitlines()[0])
    record["facts"]["colour"] = "red"
    with pytest.raises(ConfigError, match="colour"):
        list(replay([record]))
