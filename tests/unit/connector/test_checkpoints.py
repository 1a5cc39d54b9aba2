"""Checkpoints of a prompt, from the step that reaches a boundary to the step that copies them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from prfaas.agent.engine.protocol import Cancel, Message, SendOpened, Store, TransferFailed
from prfaas.connector.block_map import BlockMap
from prfaas.connector.counts import Counts
from prfaas.connector.metadata import Save, ScheduledRequest
from prfaas.connector.scheduler.store import BlockPins, PrefixStores
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup

BLOCK = 16
FULL = KVGroup("full_attention", BLOCK)
STATE = KVGroup("linear_state", BLOCK, kept_states=True)
CHAIN = HashChain(root_hash("m"), range(300))
WAIT_SECONDS = 1.0


@dataclass
class Engine:
    """Engine that computes one prompt, counts pins, and records messages."""

    pinned: Counter[int] = field(default_factory=Counter)
    posted: list[Message] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    computed: int = 0

    def __post_init__(self) -> None:
        self.checkpoints = PrefixStores(
            BlockMap((FULL, STATE, STATE)),
            BlockPins(self.pinned.update, self.pinned.subtract),
            min_tokens=48,
            post=self.posted.append,
            counts=self.counts,
        )
        self.checkpoints.begin_prompt("r", CHAIN)

    def step(self, num_tokens: int, **more: dict[int, dict[int, int]]) -> None:
        before, self.computed = self.computed, self.computed + num_tokens
        table = [100 + entry for entry in range(-(-self.computed // BLOCK))]
        request = ScheduledRequest(
            "r", self.computed, lambda: [table, table, [1000 + block for block in table]], before, **more
        )
        self.checkpoints.on_scheduled(request, reply_deadline=WAIT_SECONDS)

    @property
    def asked(self) -> list[Store]:
        return [message for message in self.posted if isinstance(message, Store)]

    @property
    def num_pinned(self) -> int:
        return self.pinned.total()


def test_a_prompt_leaves_its_states_at_boundaries_that_are_far_enough_apart() -> None:
    engine = Engine()
    for num_tokens in (16, 16, 16, 16, 20, 12, 16, 160, 32):
        engine.step(num_tokens)
    assert [store.num_tokens for store in engine.asked] == [48, 96, 272], (
        "not near the last, inside a block, or in the answer"
    )
    full, *states = engine.asked[0].groups
    assert full.num_blocks == 0
    assert [state.hashes for state in states] == [(CHAIN.at(48),)] * 2
    assert engine.pinned == Counter([102, 1102, 105, 1105, 116, 1116])


def test_a_prompt_that_begins_with_what_is_held_leaves_none_near_that() -> None:
    engine = Engine(computed=64)
    engine.step(16)
    engine.step(16)
    assert [store.num_tokens for store in engine.asked] == [96]


def test_a_state_that_the_engine_hands_over_inside_a_step_is_left_too() -> None:
    engine = Engine()
    engine.step(200, states={128: {1: 7, 2: 8}, 200: {1: 9, 2: 10}})
    assert [store.num_tokens for store in engine.asked] == [128]
    assert engine.pinned == Counter([7, 8])


def test_slots_are_copied_to_by_the_next_step_which_also_ends_the_pins() -> None:
    engine = Engine()
    engine.step(64)
    assert engine.checkpoints.saves(now=0.1) == []
    engine.checkpoints.on_message(SendOpened(engine.asked[0].transfer_id, 5, [[[], [30], [31]]]))
    (save,) = engine.checkpoints.saves(now=0.2)
    assert (save.handle, save.is_sent, save.release) == (5, False, None)
    assert [(span.span.group, span.span.block_ids, span.slots) for span in save.spans] == [
        (1, (103,), ((30,),)),
        (2, (1103,), ((31,),)),
    ]
    assert (engine.num_pinned, engine.checkpoints.has_pins) == (0, False)
    assert engine.counts == {"transfers checkpoint completed": 1}


def _failed(engine: Engine) -> list[Save]:
    engine.checkpoints.on_message(TransferFailed(engine.asked[0].transfer_id, "no_memory", ""))
    return engine.checkpoints.saves(now=0.1)


def _late(engine: Engine) -> list[Save]:
    return engine.checkpoints.saves(now=WAIT_SECONDS)


def _reset(engine: Engine) -> list[Save]:
    engine.checkpoints.fail_all("reset")
    return engine.checkpoints.saves(now=0.1)


@pytest.mark.parametrize(("end", "outcome"), [(_failed, "no_memory"), (_late, "agent_silent"), (_reset, "reset")])
def test_a_checkpoint_that_finds_no_slots_ends_its_pins(end: Callable[[Engine], list[Save]], outcome: str) -> None:
    engine = Engine()
    engine.step(64)
    assert engine.num_pinned == 2
    engine.checkpoints.end_prompt("r")
    assert end(engine) == []
    assert (engine.num_pinned, engine.checkpoints.has_pins) == (0, False)
    assert engine.posted[-1] == Cancel(engine.asked[0].transfer_id)
    assert engine.counts == {f"transfers checkpoint {outcome}": 1}


def test_a_request_that_has_ended_leaves_no_more() -> None:
    engine = Engine()
    engine.checkpoints.end_prompt("r")
    engine.step(64)
    assert engine.posted == []
