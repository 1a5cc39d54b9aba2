"""Which blocks a copy takes."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace

from prfaas import grants
from prfaas.agent.links import ORDINARY
from prfaas.agent.prefix.replicate import PrefixCopies
from prfaas.agent.transfer.grant_check import GrantCheck
from prfaas.agent.transfer.layouts import LayoutRegistry
from prfaas.agent.transfer.log import TransferLog
from prfaas.agent.transfer.open_body import OpenBody
from prfaas.agent.transfer.placement import place
from prfaas.agent.transfer.plan import make_plan
from prfaas.cachepool.pool import Pool
from prfaas.grants import Grant
from prfaas.hashing import HashChain, prefix_hash, root_hash
from prfaas.kv.layout import prefix_groups
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol.messages import Hello, decode_open
from prfaas.transport.protocol.wire import ConnectionState
from prfaas.transport.sender.link import Link, LinkConfig
from prfaas.types import AgentName, BlockHash, CopyCommand, CopyEnd, Prefix, TransferId
from tests.property.cachepool.cut_models import Attention, Cut, layouts
from tests.support.waiting import PATIENCE_SECONDS

KEY = b"g" * 32
CHAIN = HashChain(root_hash("m"), range(96))
LATENT = [Attention(1)]  # every rank holds all of it: four ranks take four times the bytes


def _no_link(address: str, name: AgentName) -> Link:
    raise AssertionError("nothing is sent")


def _command(max_bytes: int) -> CopyCommand:
    units: list[BlockHash] = [CHAIN.at(end) for end in range(16, 97, 16)]
    prefix = Prefix("m", b"".join(units), 96, CHAIN.at(96))
    grant = Grant(
        TransferId(os.urandom(16)),
        source=AgentName("west"),
        destination=AgentName("east"),
        destination_address="127.0.0.1:1",
        prompt_hash=CHAIN.at(96),
        num_tokens=96,
        max_bytes=max_bytes,
        tenant="",
        expires_at=time.time() + 60.0,
        kind="copy",
        prefix_hash=prefix_hash(prefix),
    )
    return CopyCommand(grant.transfer_id, grants.sign(grant, KEY), prefix, 0)


def test_foreign_layouts_are_not_copied() -> None:
    """They hold no prefix blocks, and may be larger than the grant allows."""
    pool, ends = Pool(1 << 20), list[CopyEnd]()
    here = LayoutRegistry(AgentName("west"), pool)
    (ours,), theirs = layouts(LATENT, Cut(1)), layouts(LATENT, Cut(4))
    pool.arena(ours)
    here.arenas(OpenBody(b"", tuple(its.fingerprint for its in theirs), theirs, ()))
    copying = PrefixCopies(
        grant_check=GrantCheck(AgentName("west"), KEY),
        pool=pool,
        arenas=here.native_arenas,
        ssd=None,
        link_to=_no_link,
        transfer_log=TransferLog(),
        report=ends.append,
    )
    copying.take(_command(max_bytes=3 * ours.groups[0].block_bytes))
    assert [ending.outcome for ending in ends] == ["evicted"]
    pool.close()


def test_repeated_copy_command_changes_the_priority() -> None:
    """What its OPEN says, once there is a connection to say it on."""
    pool, ends = Pool(1 << 20), list[CopyEnd]()
    here = LayoutRegistry(AgentName("west"), pool)
    (ours,) = layouts(LATENT, Cut(1))
    arena, command = pool.arena(ours), replace(_command(max_bytes=1 << 20), priority=1)
    plan = make_plan((ours,), prefix_groups(ours, command.prefix, root=root_hash("m")), 96)
    placement = place(pool, plan, (arena,), owner="test")
    assert placement is not None
    placement.publish(range(len(plan.object_bytes)))
    placement.release()
    link = Link(
        "127.0.0.1:1",
        config=LinkConfig(awaits_peer=True),
        local_name="west",
        peer_name="east",
        key=KEY,
        on_event=lambda event: copying.on_event(event),
    )
    copying = PrefixCopies(
        grant_check=GrantCheck(AgentName("west"), KEY),
        pool=pool,
        arenas=here.native_arenas,
        ssd=None,
        link_to=lambda address, name: link,
        transfer_log=TransferLog(),
        report=ends.append,
    )
    copying.take(command)
    copying.take(replace(command, priority=0))
    assert (len(copying), ends) == (1, [])
    assert _priority_of_the_open(link) == ORDINARY
    link.close()
    assert [ending.outcome for ending in ends] == ["shutdown"] and len(copying) == 0
    pool.close()


def _priority_of_the_open(link: Link) -> int:
    """What the peer hears on a connection that it has dialled."""
    ours, theirs = (Connection(its, state=ConnectionState.SENDING) for its in socket.socketpair())
    theirs.state = ConnectionState.RECEIVING
    theirs.set_read_timeout(PATIENCE_SECONDS)
    serving = threading.Thread(target=link.serve, args=(ours, Hello("east", bytes(32), (1,), (), bytes(range(16)))))
    serving.start()
    header = theirs.read_header()
    opened = decode_open(header, theirs.read_payload(header))
    theirs.close()
    serving.join(PATIENCE_SECONDS)
    ours.close()
    return opened.priority
