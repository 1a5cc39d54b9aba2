"""Heartbeats to the agent, and the measured prefill rate."""

import pytest

from prfaas.agent.engine.protocol import Heartbeat, Message
from prfaas.connector.scheduler import liveness
from prfaas.connector.scheduler.liveness import HEARTBEAT_SECONDS, AgentLiveness
from prfaas.connector.scheduler.prefill_rate import UNKNOWN_TOKENS_PER_SECOND, PrefillRate


def is_silent(agent: AgentLiveness) -> bool:
    """Return the property anew: a type checker assumes that it stays the same."""
    return agent.is_silent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(liveness, "time", made)
    return made


def test_an_unanswered_heartbeat_is_not_repeated(clock: Clock) -> None:
    posted: list[Message] = []
    agent = AgentLiveness(posted.append, silence_seconds=2.0)
    for _ in range(30):
        agent.beat()
        clock.now += HEARTBEAT_SECONDS
    assert posted == [Heartbeat(1)]
    agent.on_alive(1)
    agent.beat()
    agent.beat()
    assert posted == [Heartbeat(1), Heartbeat(2)]


def test_the_agent_is_silent_until_it_answers(clock: Clock) -> None:
    agent = AgentLiveness(lambda message: None, silence_seconds=2.0)
    clock.now += 60
    assert not is_silent(agent), "nobody has asked"
    agent.beat()
    clock.now += 1.9
    assert not is_silent(agent)
    agent.on_message()
    clock.now += 1.9
    assert not is_silent(agent), "another message shows life"
    clock.now += 0.2
    assert is_silent(agent)
    agent.on_alive(1)
    assert not is_silent(agent)
    clock.now += 60
    assert not is_silent(agent)


def test_a_new_agent_owes_no_answer(clock: Clock) -> None:
    posted: list[Message] = []
    agent = AgentLiveness(posted.append, silence_seconds=2.0)
    agent.beat()
    clock.now += 5
    agent.restart()
    assert not is_silent(agent)
    agent.beat()
    assert posted == [Heartbeat(1), Heartbeat(2)]


def test_the_prefill_rate_counts_overlapping_steps_once() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_second == UNKNOWN_TOKENS_PER_SECOND
    rate.on_planned(2000, now=10.0)
    rate.on_planned(2000, now=10.1)
    rate.on_step_end(now=11.0)
    rate.on_planned(1, now=11.0)
    rate.on_step_end(now=12.0)
    rate.on_step_end(now=20.0)
    assert rate.tokens_per_second == pytest.approx(2000, rel=0.01)
    assert rate.seconds(6000) == pytest.approx(3.0, rel=0.01)
