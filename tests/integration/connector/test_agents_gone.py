"""Engines whose agent hangs, dies, or is replaced: nothing meant for the old agent reaches the new one."""

import itertools
import os
import signal
import socket

import pytest

from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import Message
from prfaas.agent.engine.ring import RING_ENTRIES, EntryKind, RingEntry, RingWriter
from prfaas.connector.block_map import BlockSpan
from prfaas.connector.metadata import Load, Save, SlotSpan, Step
from prfaas.connector.worker.worker import CopyResults, WorkerSide
from tests.support.agent_nodes import NUM_TOKENS, Nodes, load_and_finish, prompt_of, receiving, sending
from tests.support.fake_engine import SHAPES, memory_of
from tests.support.paused_process import paused
from tests.support.waiting import wait_until
from tools.demo.client import is_answering


def test_a_full_ring_delays_a_transfer_but_loses_nothing(nodes: Nodes) -> None:
    prefiller, decoder = nodes.pair(SHAPES["dense"])
    prompt = prompt_of(1)
    grant = nodes.grant(prompt)
    parked, prefilling = receiving(decoder, prompt, grant), sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling)
    with paused(nodes.east.child.process.pid):
        _fill(prefiller.worker._client.ring)
        prefiller.prefill(prefilling, chunk_tokens=100)
        prefiller.end(prefilling)
        prefiller.step([])
    load_and_finish(decoder, parked)
    assert prefiller.worker.counts["ring_overflows"] > 0
    nodes.assert_nothing_is_left()


def _fill(ring: RingWriter | None) -> None:
    """Fill a ring with entries of no kind, which the agent ignores."""
    assert ring is not None
    ring._counters[0] += RING_ENTRIES
    os.eventfd_write(ring.event_fd, 1)
    assert not ring.push(RingEntry(EntryKind.FORWARD_ENDED, handle=1))


def test_a_load_that_is_planned_when_the_agent_dies_fails(mortal_nodes: Nodes) -> None:
    prefiller, decoder = mortal_nodes.pair(SHAPES["dense"])
    parked = mortal_nodes.transfer(prefiller, decoder, prompt_of(4))
    decoder.allocate(parked, decoder.await_answer(parked))
    os.kill(mortal_nodes.west.child.process.pid, signal.SIGKILL)
    mortal_nodes.west.child.process.wait()
    assert decoder.step([]) == ({parked.request_id}, {parked.request_id})
    assert decoder.outcomes() == {"receive overwritten": 1}


def test_a_new_agent_gets_no_handles_of_the_old_one(mortal_nodes: Nodes) -> None:
    """Each agent counts handles from 1, so handles of two agents may be equal."""
    prefiller, _ = mortal_nodes.pair(SHAPES["dense"])
    prompt = prompt_of(2)
    prefilling = sending(prefiller, prompt, mortal_nodes.grant(prompt))
    prefiller.await_answer(prefilling)
    prefiller.step([(prefilling, 100)])
    mortal_nodes.kill_agent("east")
    wait_until(lambda: is_answering(f"{mortal_nodes.east.status_url}/healthz"), what="the new agent")
    ends: list[int] = []

    def has_met_the_new_one() -> bool:
        ends.extend(prefiller.scheduler.plan_step([]).ends)
        return prefiller.client.connected and prefiller.outcomes() == {"send agent_lost": 1}

    wait_until(has_met_the_new_one, what="the new agent")
    assert ends == []


def test_a_step_names_no_slots_of_an_agent_whose_successor_it_meets(
    mortal_nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a reply is overdue, a step polls the agent twice."""
    engine = mortal_nodes.start(
        mortal_nodes.west, SHAPES["dense"], reuse=True, reuse_min_tokens=16, silence_seconds=0.0
    )
    first = engine.submit("first", prompt_of(1), {})
    engine.await_answer(first)
    engine.prefill(first, chunk_tokens=100)
    engine.end(first, leaves=True)

    def has_slots() -> bool:
        engine.scheduler.poll()
        return any(blocks.opened for blocks in engine.scheduler._stores._requested.values())

    wait_until(has_slots, what="slots for what the first one leaves")
    looks, look = itertools.count(1), engine.client.poll

    def poll(timeout_seconds: float = 0.0) -> list[Message]:
        if next(looks) == 1:
            return []
        mortal_nodes.kill_agent("west")
        wait_until(lambda: is_answering(f"{mortal_nodes.west.status_url}/healthz"), what="the new agent")
        return look(timeout_seconds)

    liveness = engine.scheduler._liveness

    def awaits_answer() -> bool:
        liveness.beat()
        return liveness.is_silent

    engine.submit("second", prompt_of(2), {})
    wait_until(awaits_answer, what="a heartbeat without an answer")
    monkeypatch.setattr(engine.client, "poll", poll)
    step = engine.scheduler.plan_step([])
    monkeypatch.undo()
    assert next(looks) == 3
    assert [save.spans for save in step.saves] == [()]


def test_a_scheduler_that_loses_its_connection_leaves_no_slots_in_use(nodes: Nodes) -> None:
    prefiller, decoder = nodes.pair(SHAPES["dense"])
    reader = nodes.start(nodes.west, SHAPES["dense"], reuse=True)
    whole, begun, opened = (prompt_of(seed) for seed in (1, 2, 3))
    grant = nodes.grant(whole)
    received, sent = receiving(decoder, whole, grant), sending(prefiller, whole, grant)
    prefiller.await_answer(sent)
    prefiller.prefill(sent, chunk_tokens=100)
    wait_until(lambda: decoder.scheduler.num_external_tokens(received.request_id, 0) == NUM_TOKENS, what="the KV")
    reader.await_answer(reader.submit("reader", whole, {}))
    prefiller.finish(sent)
    wait_until(lambda: nodes.status(nodes.east)["sending"] == 0, what="the end of what was sent")
    sends = [sending(prefiller, prompt, nodes.grant(prompt)) for prompt in (begun, opened)]
    for request in sends:
        prefiller.await_answer(request)
    prefiller.step([(sends[0], 100)])
    for engine in (prefiller, decoder, reader):
        engine.client._session.socket.shutdown(socket.SHUT_RDWR)
    nodes.await_nothing_read()
    assert nodes.status(nodes.east)["sending"] == len(sends), "its worker may still write"

    def are_idle() -> bool:
        for engine in (prefiller, decoder, reader):
            engine.step([])
        return all(engine.client.connected for engine in (prefiller, decoder, reader)) and nodes.are_idle()

    wait_until(are_idle, what="nodes without slots in use")
    attached = [name for agent in (nodes.east, nodes.west) for name in nodes.status(agent)["engines"]]
    for engine in (prefiller, decoder, reader):
        assert {f"{engine._instance}/{role}/0" for role in ("scheduler", "worker")} <= set(attached)
    assert prefiller.outcomes()["send agent_lost"] == len(sends)


def test_the_first_request_after_an_agents_restart_is_transferred(mortal_nodes: Nodes) -> None:
    """An idle engine has not noticed the restart."""
    prefiller, _ = mortal_nodes.pair(SHAPES["dense"])
    seeds = itertools.count(3)

    def is_begun() -> bool:
        """Try again, since the agent of a busy machine may be slower than the engine waits."""
        mortal_nodes.kill_agent("east")
        wait_until(lambda: is_answering(f"{mortal_nodes.east.status_url}/healthz"), what="the new agent")
        prompt, before = prompt_of(next(seeds)), prefiller.outcomes().get("send agent_lost", 0)
        prefiller.await_answer(sending(prefiller, prompt, mortal_nodes.grant(prompt)))
        return prefiller.outcomes().get("send agent_lost", 0) == before

    wait_until(is_begun, what="a transfer")


def test_a_worker_skips_copies_for_an_agent_that_it_is_not_attached_to(nodes: Nodes) -> None:
    memory = memory_of(SHAPES["dense"])
    client = AgentClient(str(nodes.west.socket), instance="late", role="worker", layout=memory.layout)
    worker = WorkerSide(client, memory.layers, memory.layout)
    load = Load("r", (SlotSpan(BlockSpan(0, 0, (1,)), slots=((0,),), generations=((0,),)),))
    left = Save(1, True, (SlotSpan(BlockSpan(0, 0, (1,)), slots=((0,),)),), release="left")
    worker.begin_step(Step(epoch=client.attached.epoch + 1, loads=(load,), saves=(left,)))
    assert not worker.awaits_layers
    worker.start_loads()
    worker.on_forward_end()
    assert worker.take_results() == CopyResults(frozenset({"r"}), frozenset({"r"}), frozenset({"left"}))
    worker.close()
