"""Queries on one stream: each gets its own answer, and managers without streams still work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from prfaas.errors import IndexRefusal, ManagerUnreachable
from prfaas.rpc.channel import Channel
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.streams import BATCHES_KEY, FAILED
from tests.integration.manager.scripted_manager import scripted_manager
from tests.support.deployment import SECRET, Deployment, chain_of, hybrid_layout, match_request, stored, until_usable
from tests.support.waiting import PATIENCE_SECONDS, POLL_SECONDS
from tools.free_ports import free_address

LAYOUT = hybrid_layout()


async def test_simultaneous_queries_get_their_own_answers(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    reporter = await deployment.node("n1", manager)
    client = deployment.client(manager)
    reporter.publish(stored(LAYOUT, chain_of(641), 640))
    await until_usable(client, chain_of(641), {"n1": 640})
    limits = [*range(0, 640, 16)]
    asked = [client.match(match_request(chain_of(limit + 1))) for limit in limits]
    nobodys = asyncio.create_task(client.match(pb.MatchRequest(model="?")))
    found = await asyncio.gather(*asked)
    assert [max((node.attention_tokens for node in answer.nodes), default=0) for answer in found] == limits
    with pytest.raises(IndexRefusal) as refusal:
        await nobodys
    assert refusal.value.reason == "unknown_model"


async def test_queries_of_one_message_are_answered_together(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    await deployment.node("n1", manager, holds=stored(LAYOUT, chain_of(641), 640))
    await until_usable(deployment.client(manager), chain_of(641), {"n1": 640})
    channel = Channel(manager.address, name="router", secret=SECRET)

    async def asked() -> AsyncIterator[pb.Question]:
        further = [
            pb.Question(id=2, match=pb.MatchRequest(model="?")),
            pb.Question(id=3, match=match_request(chain_of(321))),
        ]
        yield pb.Question(id=1, match=match_request(chain_of(641)), further=further)

    try:
        call = channel.stream("Ask", asked())
        replies = [part async for reply in call for part in (reply, *reply.further)]
        assert BATCHES_KEY in dict(await call.initial_metadata())
    finally:
        await channel.close()
    found = {reply.id: reply.match.nodes[0].attention_tokens for reply in replies if reply.HasField("match")}
    assert found == {1: 640, 3: 320}
    assert {reply.id: reply.refusal.reason for reply in replies if reply.HasField("refusal")} == {2: "unknown_model"}


async def test_first_queries_after_a_restart_are_not_lost(deployment: Deployment) -> None:
    address = free_address()
    client = None
    for _ in range(3):
        manager = await deployment.start_manager(listen=address)
        client = client or deployment.client(manager, deadline_seconds=PATIENCE_SECONDS)
        await _until_refused(client)
        await deployment.stop_manager(manager)


async def _until_refused(client: ManagerClient) -> None:
    """Query an unknown model until the manager refuses it. It may be away, but no query may stay unanswered."""
    while True:
        try:
            await client.match(pb.MatchRequest(model="?"))
        except IndexRefusal:
            return
        except ManagerUnreachable as error:
            if "no answer in time" in str(error):
                raise
            await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def _client_of(ask: Any) -> AsyncIterator[ManagerClient]:
    """Yield a client of a manager that answers streams of queries with `ask`."""
    handler = grpc.stream_stream_rpc_method_handler(
        ask, pb.Question.FromString, lambda reply: reply.SerializeToString()
    )
    async with scripted_manager(Ask=handler) as addresses:
        client = ManagerClient(addresses, name="router", secret=SECRET, deadline_seconds=PATIENCE_SECONDS)
        try:
            yield client
        finally:
            await client.close()


class _Recording:
    """Server that answers each query with its limit, and records the size of each message."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, int]] = []  # Queries and bytes of hashes.
        self.gate = asyncio.Event()

    async def ask(self, questions: AsyncIterator[pb.Question], context: Any) -> AsyncIterator[pb.Reply]:
        async for message in questions:
            asked = (message, *message.further)
            self.messages.append((len(asked), sum(len(query.match.units) for query in asked)))
            replies = [
                pb.Reply(id=query.id, match=pb.MatchResponse(odd_lengths=[query.match.limit_tokens])) for query in asked
            ]
            replies[0].further.extend(replies[1:])
            yield replies[0]
            await self.gate.wait()

    async def asked_at_once(self, requests: list[pb.MatchRequest]) -> list[int]:
        """Return the limits that came back: first of one query, then of these while the server reads nothing."""
        async with _client_of(self.ask) as client:
            await client.match(pb.MatchRequest(limit_tokens=1))
            asked = [asyncio.create_task(client.match(request)) for request in requests]
            await asyncio.sleep(0)
            self.gate.set()
            return [answer.odd_lengths[0] for answer in await asyncio.gather(*asked)]


async def test_batches_are_bounded_in_number_and_size() -> None:
    server = _Recording()
    short = [pb.MatchRequest(limit_tokens=number) for number in range(100)]
    long = [pb.MatchRequest(limit_tokens=number, units=bytes(400_000)) for number in range(6)]
    assert await server.asked_at_once([*short, *long]) == [*range(100), *range(6)]
    assert sum(count for count, _ in server.messages) == 107
    assert len(server.messages) < 20 and max(count for count, _ in server.messages) <= 64
    assert max(num_bytes for _, num_bytes in server.messages) <= 1 << 20


async def test_failed_query_does_not_affect_others() -> None:
    async def ask(questions: AsyncIterator[pb.Question], context: Any) -> AsyncIterator[pb.Reply]:
        async for question in (part async for message in questions for part in (message, *message.further)):
            if question.match.limit_tokens:
                yield pb.Reply(id=question.id, match=pb.MatchResponse(odd_lengths=[question.match.limit_tokens]))
            else:
                yield pb.Reply(id=question.id, refusal=pb.Refusal(reason=FAILED, message="KeyError"))

    async with _client_of(ask) as client:
        failed = asyncio.create_task(client.match(pb.MatchRequest()))
        assert (await client.match(pb.MatchRequest(limit_tokens=7))).odd_lengths == [7]
        with pytest.raises(ManagerUnreachable, match="KeyError"):
            await failed
