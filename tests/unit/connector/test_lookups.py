"""Promises of a router's decision: kept with blocks of engine or pool, or broken, with the KV groups that fall short."""

import pytest

from prfaas.agent.engine.protocol import Hold, LookedUp, Lookup, Message, Promised
from prfaas.connector.block_map import BlockMap
from prfaas.connector.counts import Counts
from prfaas.connector.scheduler.prefill_rate import PrefillRate
from prfaas.connector.scheduler.prefix_lookup import PrefixLookups
from prfaas.connector.scheduler.receive import InboundTransfers
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup

CHAIN = HashChain(root_hash("m"), range(500))
GROUPS = BlockMap((KVGroup("full_attention", 16), KVGroup("linear_state", 1 << 20)))


def _incoming(posted: list[Message]) -> InboundTransfers:
    return InboundTransfers(
        GROUPS, silence_seconds=2.0, prefill_rate=PrefillRate(), post=posted.append, counts=Counts()
    )


@pytest.mark.parametrize(
    ("lengths", "local_tokens", "says"),
    [
        ([480], 0, Promised(480, 480)),
        ([160], 0, Promised(480, 160)),
        ([160], 480, Promised(480, 480)),
        ([], 16, Promised(480, 16)),
    ],
)
def test_a_promise_is_compared_with_what_can_be_taken_up(lengths: list[int], local_tokens: int, says: Promised) -> None:
    posted: list[Message] = []
    incoming = _incoming(posted)
    lookups = PrefixLookups(incoming, post=posted.append, counts=Counts())
    lookups.begin("r", CHAIN, promised_tokens=480, reply_deadline=1.0)
    (asked,) = posted
    assert isinstance(asked, Lookup)
    found = [[length, CHAIN.at(length)] for length in lengths]
    lookups.on_message(LookedUp(asked.transfer_id, found))
    assert not lookups.is_undecided("r", local_tokens, now=0.1)
    assert posted[1] == says
    assert any(isinstance(message, Hold) for message in posted) == (max(lengths, default=0) > local_tokens)
