"""Copies of prefixes: the blocks that leave, and their priority."""

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
from tests.support.repack_models import Attention, Cut, layouts
from tests.support.waiting import PATIENCE_SECONDS

KEY = b"g" * 32
CHAIN = HashChain(root_hash("m"), range(96))
# Every rank holds all of it, so four ranks take four times the bytes.
LATENT = [Attention(1)]


def _no_link(address: str, name: AgentName) -> Link:
    raise AssertionError("unexpected link")


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
    """They hold no prefix blocks and may exceed the granted bytes."""
    pool, ends = Pool(1 << 20), list[CopyEnd]()
    here = LayoutRegistry(AgentName("west"), pool)
    (native,), foreign = layouts(LATENT, Cut(1)), layouts(LATENT, Cut(4))
    pool.arena(native)
    here.arenas(OpenBody(b"", tuple(layout.fingerprint for layout in foreign), foreign, ()))
    copies = PrefixCopies(
        grant_check=GrantCheck(AgentName("west"), KEY),
        pool=pool,
        arenas=here.native_arenas,
        link_to=_no_link,
        transfer_log=TransferLog(),
        report=ends.append,
    )
    copies.take(_command(max_bytes=3 * native.groups[0].block_bytes))
    assert [ending.outcome for ending in ends] == ["evicted"]
    pool.close()


def test_repeated_copy_command_changes_the_priority() -> None:
    """The OPEN has the new priority once there is a connection."""
    pool, ends = Pool(1 << 20), list[CopyEnd]()
    here = LayoutRegistry(AgentName("west"), pool)
    (native,) = layouts(LATENT, Cut(1))
    arena, command = pool.arena(native), replace(_command(max_bytes=1 << 20), priority=1)
    plan = make_plan((native,), prefix_groups(native, command.prefix, root=root_hash("m")), 96)
    placement = place(pool, plan, (arena,))
    assert placement is not None
    placement.publish(range(len(plan.object_bytes)))
    placement.release()
    link = Link(
        "127.0.0.1:1",
        config=LinkConfig(awaits_peer=True),
        local_name="west",
        peer_name="east",
        key=KEY,
        on_event=lambda event: copies.on_event(event),
    )
    copies = PrefixCopies(
        grant_check=GrantCheck(AgentName("west"), KEY),
        pool=pool,
        arenas=here.native_arenas,
        link_to=lambda address, name: link,
        transfer_log=TransferLog(),
        report=ends.append,
    )
    copies.take(command)
    copies.take(replace(command, priority=0))
    assert (len(copies), ends) == (1, [])
    assert _priority_of_the_open(link) == ORDINARY
    link.close()
    assert [ending.outcome for ending in ends] == ["shutdown"] and len(copies) == 0
    pool.close()


def _priority_of_the_open(link: Link) -> int:
    """Return the priority in the OPEN on a connection that the peer dialled."""
    near, far = (Connection(end, state=ConnectionState.SENDING) for end in socket.socketpair())
    far.state = ConnectionState.RECEIVING
    far.set_read_timeout(PATIENCE_SECONDS)
    serving = threading.Thread(target=link.serve, args=(near, Hello("east", bytes(32), (1,), (), bytes(range(16)))))
    serving.start()
    header = far.read_header()
    opened = decode_open(header, far.read_payload(header))
    far.close()
    serving.join(PATIENCE_SECONDS)
    near.close()
    return opened.priority
