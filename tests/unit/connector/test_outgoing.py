"""Message to the agent for a prefill leg."""

from __future__ import annotations

from prfaas.agent.engine.protocol import Message, Send
from prfaas.connector.block_map import BlockMap
from prfaas.connector.metadata import Counts
from prfaas.connector.scheduler.send import OutboundTransfers
from prfaas.connector.transfer_params import EngineRequest, RequestedTransfer
from prfaas.grants import Grant
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.types import AgentName, TransferId

CHAIN = HashChain(root_hash("m"), range(100))
GRANT = Grant(TransferId(bytes(16)), AgentName("a"), AgentName("b"), "h:1", CHAIN.at(100), 100, 1 << 20, "", 2e9)


def test_the_agent_gets_the_priority_of_the_request() -> None:
    posted: list[Message] = []
    outgoing = OutboundTransfers(BlockMap((KVGroup("full_attention", 16),)), post=posted.append, counts=Counts())
    request = EngineRequest("r", 100, {}, lambda tenant: CHAIN, priority=-2)
    outgoing.begin(request, RequestedTransfer("send", b"token", GRANT), CHAIN, reply_deadline=1.0)
    (asked,) = posted
    assert isinstance(asked, Send) and (asked.transfer_id, asked.priority) == (GRANT.transfer_id, -2)
