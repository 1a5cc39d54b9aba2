"""An engine that is told to forget: its agent does, for all engines of the model."""

from tests.support.agent_nodes import Nodes, leave_prefix, prompt_of
from tests.support.fake_engine import SHAPES
from tests.support.paused_process import paused
from tests.support.waiting import wait_until

REUSES = {"reuse": True, "reuse_min_tokens": 16}


def test_an_agent_that_hangs_or_is_gone_has_not_forgotten_and_the_next_attempt_succeeds(mortal_nodes: Nodes) -> None:
    engine = mortal_nodes.start(mortal_nodes.west, SHAPES["dense"], **REUSES, silence_seconds=1.0)
    leave_prefix(engine, prompt_of(6, 320))
    with paused(mortal_nodes.west.child.process.pid):
        assert not engine.scheduler.reset(mortal_nodes.model)
    wait_until(lambda: engine.scheduler.reset(mortal_nodes.model), what="the agent that goes on")
    assert engine.await_answer(engine.submit("after", prompt_of(6, 380), {})) == 0
    mortal_nodes.west.child.process.kill()
    mortal_nodes.west.child.process.wait()
    assert not engine.scheduler.reset(mortal_nodes.model)
    mortal_nodes.kill_agent("west")
    wait_until(lambda: engine.scheduler.reset(mortal_nodes.model), what="the new agent")
