from dataclasses import replace

from prfaas.manager.routing.decision_log import MAX_DECISIONS, DecisionLog, RecordedDecision
from prfaas.scheduler.route import Decision, route
from prfaas.scheduler.snapshot import InstanceState, PathState, RequestFacts, Snapshot
from prfaas.types import AgentName, ClusterName, InstanceId

DECODE = InstanceState(InstanceId("d1-engine"), ClusterName("west"), "pd", "both", AgentName("d1"))
SNAPSHOT = Snapshot(500, (DECODE,))


def decided(num_tokens: int, *, cached: int = 0, decision: Decision | None = None) -> RecordedDecision:
    facts = RequestFacts(num_tokens, cached_tokens={AgentName("d1"): cached})
    return RecordedDecision(1.0, "tiny", "acme", "s1", SNAPSHOT, facts, decision or route(SNAPSHOT, facts))


def test_summary_has_uncached_tokens_and_threshold() -> None:
    row = decided(400, cached=320).summary()
    assert (row["num_prompt_tokens"], row["num_uncached_tokens"], row["threshold_tokens"]) == (400, 80, 500)
    assert decided(400, decision=Decision("refused", "no_decode_instance")).summary()["num_uncached_tokens"] is None


def test_threshold_is_that_of_the_path_that_decided() -> None:
    prefill = InstanceState(InstanceId("p1"), ClusterName("east"), "prfaas", "prefill", AgentName("p1"))
    path = PathState(ClusterName("east"), ClusterName("west"), 2000)
    snapshot = replace(SNAPSHOT, instances=(prefill, DECODE), paths=(path,))
    for num_tokens, reason, threshold in ((400, "short", 500), (1000, "congested", 2000), (3000, "long", 2000)):
        facts = RequestFacts(num_tokens)
        row = replace(decided(2), snapshot=snapshot, facts=facts, decision=route(snapshot, facts)).summary()
        assert (row["reason"], row["threshold_tokens"]) == (reason, threshold)


def test_latest_decisions_come_first_and_repeated_ones_count_once() -> None:
    decisions = DecisionLog()
    for number in range(MAX_DECISIONS + 1):
        decisions.remember(number.to_bytes(8, "big"), decided(number + 2))
    decisions.remember((1).to_bytes(8, "big"), decided(77))
    decisions.remember(b"", decided(5))
    latest = list(decisions.latest())
    assert [len(latest), latest[0][1].facts.num_prompt_tokens] == [MAX_DECISIONS, 77]
    assert decisions.get((0).to_bytes(8, "big")) is None
