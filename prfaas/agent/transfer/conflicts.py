"""Asks peer agents, before an engine attaches, whether they hold its model with another layout."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from prfaas.agent.transfer.plan import encode_probe
from prfaas.cachepool.layout import Layout
from prfaas.transport.sender.api import SendCompleted, SendEvent, SendFailed, SendRequest
from prfaas.transport.sender.link import Link
from prfaas.types import AgentName, TransferId

PROBE_DEADLINE_SECONDS = 2.0  # a peer that does not answer by then is taken to be down, which is no conflict


class LayoutProbes:
    """The probes under way. Runs on the agent's loop; link events are handed over to it."""

    def __init__(self, peers: Sequence[str], link_to: Callable[[str, AgentName], Link]) -> None:
        """`peers` are name=host:port."""
        self._peers = peers
        self._link_to = link_to
        self._answers: dict[TransferId, asyncio.Future[str | None]] = {}

    async def conflict(self, layout: Layout) -> str | None:
        """What a peer that answers holds against the layout, in words."""
        answers = await asyncio.gather(*(self._probe(peer, layout) for peer in self._peers))
        return next((answer for answer in answers if answer), None)

    async def _probe(self, peer: str, layout: Layout) -> str | None:
        name, _, address = peer.partition("=")
        transfer_id = TransferId(secrets.token_bytes(16))
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._answers[transfer_id] = answer
        self._link_to(address, AgentName(name)).open(
            SendRequest(
                transfer_id=transfer_id,
                open_body=encode_probe(layout),
                object_bytes=[],
                source=_no_object,
                priority=0,
                deadline_seconds=PROBE_DEADLINE_SECONDS,
            )
        )
        try:
            async with asyncio.timeout(2 * PROBE_DEADLINE_SECONDS):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._answers[transfer_id]

    def on_event(self, event: SendEvent) -> bool:
        """What a link says; whether it was about a probe."""
        answer = self._answers.get(TransferId(event.transfer_id))
        if answer is not None and not answer.done() and isinstance(event, SendCompleted):
            answer.set_result(None)
        elif answer is not None and not answer.done() and isinstance(event, SendFailed):
            answer.set_result(event.message if event.reason == "layout_mismatch" else None)
        return answer is not None


def _no_object(index: int) -> memoryview:
    raise AssertionError(f"a probe has no object {index}")
