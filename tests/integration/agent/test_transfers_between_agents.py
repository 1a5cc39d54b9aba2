"""Transfers between two real agents over TCP: one engine's layers arrive in another engine's slots."""

import math
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import Alive, Cancel, Heartbeat, ReceiveReady, Release, Send, TransferDone
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.console.authority import Authority
from prfaas.errors import AgentUnreachable, LayoutError
from prfaas.hashing import HashChain
from prfaas.types import AgentName, TransferId
from tests.support.agents import NUM_TOKENS, Agents, Engine, RunningAgent, blocks, chain_of, layout
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.free_ports import free_address

# For agents whose peer is unreachable. Other tests do not give up on slow agents.
GIVES_UP = {"silence-seconds": "0.5s"}


def _claim(west: RunningAgent, receiver: Engine, grant: tuple[TransferId, bytes], chain: HashChain) -> None:
    """Claim a transfer and wait until the agent knows of the claim."""
    receiver.claim(*grant, chain)
    wait_until(lambda: west.status_page()["receiving"] > 0, what="the claim")


def _transfer(agents: Agents, west: RunningAgent, sender: Engine, receiver: Engine, chain: HashChain) -> ReceiveReady:
    transfer_id, grant = agents.grant("east", west, chain)
    receiver.claim(transfer_id, grant, chain)
    sender.write_all(sender.open_send(transfer_id, grant, chain))
    sender.wait(TransferDone)
    sender.scheduler.post(Cancel(transfer_id))
    return receiver.wait(ReceiveReady)


def test_layers_arrive_complete_and_slots_become_free(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    ready = _transfer(agents, west, sender, receiver, chain_of())
    receiver.assert_content(ready)
    assert ready.generations[0][0] == [receiver.workers[0].slot_generations()[slot] for slot in ready.slots[0][0]]
    receiver.scheduler.post(Release(ready.transfer_id))
    wait_until(lambda: east.pool()["transfer"] == west.pool()["transfer"] == 0)
    # Six full blocks and the state.
    assert east.pool()["prefix"] == west.pool()["prefix"] == 7


def test_heartbeat_is_answered_with_the_progress_of_claims(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain = chain_of()
    transfer_id, grant = agents.grant("east", west, chain)
    receiver.claim(transfer_id, grant, chain)
    receiver.scheduler.post(Heartbeat(1))
    assert receiver.wait(Alive) == Alive(1, []), "the sender has not opened it"
    opened = sender.open_send(transfer_id, grant, chain)
    sender.write_layer(opened, 0, 0, blocks=range(len(opened.slots[0][0])))
    first_layer_bytes = len(opened.slots[0][0]) * 6000
    claims: list[list[Any]] = []

    def has_first_layer() -> bool:
        receiver.scheduler.post(Heartbeat(2))
        claims[:] = receiver.wait(Alive).claims
        return bool(claims) and claims[0][1] - claims[0][2] == first_layer_bytes

    wait_until(has_first_layer, what="the progress of the first layer")
    assert claims[0][0] == transfer_id
    assert 0 < claims[0][4] <= claims[0][3] < 10


def test_record_waits_for_the_end_of_the_forward_pass(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, _ = agents.engine(east, "e"), agents.engine(west, "w")
    chain = chain_of()
    transfer_id, grant = agents.grant("east", west, chain)
    opened = sender.open_send(transfer_id, grant, chain)
    sender.write_layers(opened)
    sender.wait(TransferDone)
    assert east.transfers()[0]["outcome"] == "running"
    for kind in (EntryKind.FORWARD_ENDED, EntryKind.REQUEST_ENDED):
        sender.push(RingEntry(kind, opened.handle, group=1))
    wait_until(lambda: east.transfers()[0]["outcome"] == "completed", what="the end of the record")
    assert east.transfers()[0]["forward_ended_seconds"] is not None


def test_agent_behind_a_firewall_receives_over_reverse_connections(agents: Agents) -> None:
    east = agents.start("east", **{"dialled-by": "west"})
    west = agents.start("west", **{"fetch-from": f"east={east.wire}"})
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    # The address in the grant refuses every connection.
    west.wire = free_address()
    ready = _transfer(agents, west, sender, receiver, chain_of())
    receiver.assert_content(ready)
    assert west.status_page()["reverse_connections"][0]["num_connections"] > 0


def test_egress_limit_paces_the_sender(agents: Agents) -> None:
    east, west = agents.start("east", egress='[{"peers": "w*", "max_rate": "64Mbps"}]'), agents.start("west")
    _transfer(agents, west, agents.engine(east, "e"), agents.engine(west, "w"), chain_of())

    def pace() -> float:
        (link,) = east.status_page()["links"]
        return float(link["pacing_bytes_per_second"])

    wait_until(lambda: math.isclose(pace(), 8e6, rel_tol=0.01), what="the limit, over all connections")


def test_only_missing_blocks_are_sent(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    first = _transfer(agents, west, sender, receiver, chain_of())
    receiver.scheduler.post(Release(first.transfer_id))
    longer = chain_of(length=NUM_TOKENS + 64)
    second = _transfer(agents, west, sender, receiver, longer)
    receiver.assert_content(second)
    records = west.transfers()
    block, state = 12_000, 50_000
    assert records[0]["held_bytes"] == 0
    assert records[1]["held_bytes"] == 6 * block
    # Blocks 6, 7 and the partial 8, and the state of another length.
    missing = 3 * block + state
    assert missing <= int(str(records[1]["wire_bytes"])) <= missing * 1.005 + 100


@pytest.mark.parametrize("changes", [{"expires_at": 1.0}, {"source": AgentName("elsewhere")}])
def test_send_without_valid_grant_is_refused(agents: Agents, changes: dict[str, object]) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender = agents.engine(east, "e")
    chain = chain_of()
    transfer_id, grant = agents.grant("east", west, chain, **changes)
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    sender.fails("grant_refused")
    assert east.pool()["transfer"] == 0


@pytest.mark.parametrize("is_claimed", [True, False], ids=["claimed before", "claimed afterwards"])
@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [({"max_bytes": 1000}, {}, "grant_refused"), ({}, {"pool-bytes": "300KiB"}, "no_memory")],
    ids=["more bytes than granted", "no room"],
)
def test_receiver_gets_the_reason_of_a_sender_that_cannot_send(
    agents: Agents, changes: dict[str, object], settings: dict[str, str], reason: str, is_claimed: bool
) -> None:
    """The open timeout cannot end the claim within this test."""
    east, west = agents.start("east", **settings), agents.start("west", **{"open-timeout-seconds": "600s"})
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain = chain_of()
    transfer_id, grant = agents.grant("east", west, chain, **changes)
    if is_claimed:
        _claim(west, receiver, (transfer_id, grant), chain)
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    sender.fails(reason)
    if not is_claimed:
        receiver.claim(transfer_id, grant, chain)
    receiver.fails(reason)


@pytest.mark.parametrize("is_lost", [True, False], ids=["engine lost", "request ended"])
def test_prefill_that_ends_early_fails_the_receiver(agents: Agents, is_lost: bool) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain = chain_of()
    transfer_id, grant = agents.grant("east", west, chain)
    _claim(west, receiver, (transfer_id, grant), chain)
    opened = sender.open_send(transfer_id, grant, chain)
    sender.write_layer(opened, 0, 0, blocks=range(3))
    if is_lost:
        sender.close()
    else:
        sender.scheduler.post(Cancel(transfer_id))
        sender.fails("incomplete")
    receiver.fails("incomplete")
    wait_until(lambda: east.pool()["transfer"] == west.pool()["transfer"] == 0)


def test_killed_sending_agent_fails_the_receiver(processes: Agents) -> None:
    east, west = processes.start("east"), processes.start("west", **GIVES_UP)
    sender, receiver = processes.engine(east, "e"), processes.engine(west, "w")
    chain = chain_of()
    transfer_id, grant = processes.grant("east", west, chain)
    _claim(west, receiver, (transfer_id, grant), chain)
    opened = sender.open_send(transfer_id, grant, chain)
    sender.write_layer(opened, 0, 0, blocks=range(3))
    wait_until(lambda: west.pool().get("transfer", 0) > 0)
    east.process.kill()
    receiver.fails("unreachable")
    wait_until(lambda: west.pool()["transfer"] == 0)
    wait_until(lambda: sender.scheduler.poll(0.01) == [] and not sender.scheduler.connected)


def test_transfer_beyond_the_receivers_memory_is_refused(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west", **{"pool-bytes": "300KiB"})
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain = chain_of()
    transfer_id, grant = agents.grant("east", west, chain)
    _claim(west, receiver, (transfer_id, grant), chain)
    sender.open_send(transfer_id, grant, chain)
    sender.fails("no_memory")
    receiver.fails("no_memory")


def test_layout_that_differs_from_a_local_engine_cannot_attach(agents: Agents) -> None:
    west = agents.start("west")
    first = agents.engine(west, "a")
    with pytest.raises(LayoutError, match="a runs this model too: layer a0 dtype: float32 here, bfloat16 there"):
        agents.engine(west, "b", layout(dtype="bfloat16"))
    first.close()


def test_missing_agent_is_named_by_socket_path(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachable, match=r"no agent listens at .*nowhere\.sock"):
        AgentClient(str(tmp_path / "nowhere.sock"), instance="x", role="scheduler")


def test_agent_with_another_secret_is_refused(agents: Agents, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    strangers = Agents(tmp_path / "other")
    east, west = strangers.start("east", **GIVES_UP), agents.start("west")
    sender = agents.engine(east, "e")
    chain = chain_of()
    transfer_id, grant = strangers.grant("east", west, chain)
    before = _num_refused(west, "secret")
    sender.open_send(transfer_id, grant, chain)
    sender.fails("unreachable")
    assert west.transfers() == []
    assert _num_refused(east, "secret") > 0
    wait_until(lambda: _num_refused(west, "secret") > before, what="the other end's count")
    strangers.stop()


def _tls(authority: Authority, name: str) -> dict[str, str]:
    issued = authority.issue(name)
    return {f"tls-{kind}": str(getattr(issued, kind)) for kind in ("authority", "certificate", "key", "revocations")}


def test_agents_with_certificates_refuse_peers_without(agents: Agents, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    west = agents.start("west", **_tls(authority, "west"))
    east = agents.start("east", **_tls(authority, "east"))
    receiver = agents.engine(west, "w")
    receiver.assert_content(_transfer(agents, west, agents.engine(east, "e"), receiver, chain_of()))
    bare = agents.start("bare", **GIVES_UP)
    sender, chain, before = agents.engine(bare, "b"), chain_of(first=7000), _num_refused(west, "tls_none")
    transfer_id, grant = agents.grant("bare", west, chain)
    sender.open_send(transfer_id, grant, chain)
    sender.fails("unreachable")
    wait_until(lambda: _num_refused(west, "tls_none") > before, what="the count of those without certificates")


def _num_refused(agent: RunningAgent, reason: str) -> float:
    wanted = f'prfaas_agent_wire_refusals_total{{reason="{reason}"}}'
    with urllib.request.urlopen(f"http://{agent.status}/metrics", timeout=PATIENCE_SECONDS) as page:
        refusals = [line for line in page.read().decode().splitlines() if line.startswith(wanted)]
    return sum(float(line.split()[-1]) for line in refusals)
