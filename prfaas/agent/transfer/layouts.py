"""Which layouts each peer's process has accepted: a later open to the same process need not describe them again."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from prfaas.agent.transfer.grant_check import Refusal
from prfaas.agent.transfer.plan import OpenBody, encode_probe, probed_layout, read_layout
from prfaas.agent.transfer.repack import obstacle
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.kv.layout import Layout, difference, fingerprint_of
from prfaas.transport.receiver.admission import FairQuota
from prfaas.transport.receiver.api import Accepted, OpenRequest, Rejected
from prfaas.transport.sender.api import SendCompleted, SendEvent, SendFailed, SendRequest
from prfaas.transport.sender.link import Link
from prfaas.types import AgentName, TransferId


class AcceptedLayouts:
    """Fingerprints by peer. Another process at the same peer, or one that cannot be named, knows nothing."""

    def __init__(self) -> None:
        self._by_peer: dict[str, tuple[bytes, set[bytes]]] = {}  # the process, and what it has accepted

    def knows(self, peer: str, process: bytes | None, fingerprints: Collection[bytes]) -> bool:
        """Whether this process of the peer has accepted all of them."""
        its_process, accepted = self._by_peer.get(peer, (None, set()))
        return process is not None and process == its_process and accepted.issuperset(fingerprints)

    def accept(self, peer: str, process: bytes, fingerprints: Iterable[bytes]) -> None:
        """This process has accepted them; what another one accepted before it is forgotten."""
        if self._by_peer.get(peer, (b"", set()))[0] != process:
            self._by_peer[peer] = process, set()
        self._by_peer[peer][1].update(fingerprints)

    def forget(self, peer: str, fingerprints: Iterable[bytes]) -> None:
        """The peer has not got these, or not any more."""
        if peer in self._by_peer:
            self._by_peer[peer][1].difference_update(fingerprints)


def answer_layout_probe(request: OpenRequest, layouts: LayoutRegistry) -> Accepted | Rejected:
    """Accepted: they would be, or nobody here has the model.

    Raises:
        LayoutError: the layout is malformed.
        RemoteProtocolError: it is no probe.
    """
    packed = probed_layout(request.open_body)
    known = layouts.known(packed)
    if known is None and not layouts.may_describe(request.peer_name, len(packed)):
        return Rejected("no_memory", TOO_MUCH)
    found = layouts.conflict(known or read_layout(packed))
    return Rejected("layout_mismatch", found) if found else Accepted(held=(), destination=_no_destination)


def _no_destination(index: int) -> memoryview:
    raise AssertionError(f"a probe has no object {index}")


MAX_FOREIGN_LAYOUTS = 256  # ranks of engines of other tensor-parallel sizes: a file descriptor and a little memory each
# Bytes of layouts unknown here that are read in so many seconds, over all peers; the agent does nothing else meanwhile. An
# engine of eight ranks and 130 layers describes 200 KB, once.
MAX_DESCRIBED_BYTES, DESCRIBED_SECONDS = 4 << 20, 4.0
TOO_MUCH = "peers have described too many layouts of late; come again"


class LayoutRegistry:
    """The layouts of one node. A *foreign* one is no engine's here: what arrives in it is cut anew and kept for nobody."""

    def __init__(self, name: AgentName, pool: Pool, *, max_foreign: int = MAX_FOREIGN_LAYOUTS) -> None:
        self._name = name
        self._pool = pool
        self._max_foreign = max_foreign
        self._foreign: OrderedDict[bytes, None] = OrderedDict()  # fingerprints, what was used longest ago first
        self._described, self._described_until = FairQuota(MAX_DESCRIBED_BYTES), 0.0  # monotonic seconds

    def expire(self, now: float) -> None:
        """Peers may describe layouts again, once enough time has passed; `now` is monotonic seconds."""
        if now >= self._described_until:
            self._described, self._described_until = FairQuota(MAX_DESCRIBED_BYTES), now + DESCRIBED_SECONDS

    def known(self, packed: memoryview) -> Layout | None:
        """The layout that a peer has packed so, where an arena here has it: it need not be read."""
        arena = self._pool.arena_of(fingerprint_of(packed))
        return None if arena is None else arena.layout

    def may_describe(self, peer: str, num_bytes: int) -> bool:
        """Whether so much of what a peer says of unknown layouts is to be read; it counts."""
        has_room = self._described.has_room(peer, num_bytes)
        if has_room:
            self._described.change(peer, num_bytes)
        return has_room

    def wants_description(self, peer: str, fingerprints: Collection[bytes], num_bytes: int) -> bool:
        """Whether what an OPEN says of layouts is to be read: where all are known it need not be.

        Raises:
            Refusal: too much was read of late.
        """
        if all(self._pool.arena_of(fingerprint) is not None for fingerprint in fingerprints):
            return False
        if not self.may_describe(peer, num_bytes):
            raise Refusal("no_memory", TOO_MUCH)
        return True

    def attached(self, layout: Layout) -> None:
        """An engine here has this layout."""
        self._foreign.pop(layout.fingerprint, None)

    def are_foreign(self, layouts: Collection[Layout]) -> bool:
        return any(layout.fingerprint in self._foreign for layout in layouts)

    def conflict(self, theirs: Layout) -> str | None:
        """What keeps the engines of the same model here from reading blocks of `theirs`, in words; None where nothing does.

        Where no rank of a model is cut as theirs is, blocks are cut anew; where another rank is, theirs has not come yet.
        """
        ours = self._of_model(theirs.model)
        alike = [our for our in ours if our.shard.size == theirs.shard.size]
        same = next((its for its in alike if its.shard == theirs.shard), None)
        if theirs in ours or not ours or (alike and same is None):
            return None
        if same is not None:
            return f"{self._name} holds this model with another layout: {difference(same, theirs)}"
        sizes = f"tensor-parallel size: {ours[0].shard.size} here, {theirs.shard.size} there"
        found = obstacle(theirs, ours[0])
        return found and f"{self._name} holds this model with another layout: {sizes}; {found}"

    def _of_model(self, model: str) -> list[Layout]:
        return [arena.layout for arena in self.native_arenas() if arena.layout.model == model]

    def native_arenas(self) -> list[Arena]:
        """Those of engines here."""
        return [arena for arena in self._pool.arenas if arena.layout.fingerprint not in self._foreign]

    def arenas(self, opened: OpenBody) -> tuple[Arena, ...]:
        """One for each rank of the engine that sends.

        Raises:
            Refusal: they are not the ranks of one engine, or nobody here can read what they hold.
        """
        if found := next((text for layout in opened.layouts if (text := self.conflict(layout))), None):
            raise Refusal("layout_mismatch", found)
        first = self._arena(opened, opened.fingerprints[0])
        if len(opened.fingerprints) != first.layout.shard.size:
            raise Refusal("no_layout", f"{len(opened.fingerprints)} of {first.layout.shard.size} ranks")
        arenas = tuple(self._arena(opened, fingerprint) for fingerprint in opened.fingerprints)
        for rank, layout in enumerate(arena.layout for arena in arenas):
            its = replace(first.layout.shard, rank=rank)
            if (layout.model, layout.packing, layout.shard) != (first.layout.model, first.layout.packing, its):
                raise Refusal("no_layout", f"the layout in place {rank} is of another model or rank")
        return arenas

    def _arena(self, opened: OpenBody, fingerprint: bytes) -> Arena:
        arena = self._pool.arena_of(fingerprint)
        is_foreign = fingerprint in self._foreign
        if arena is not None and not (opened.is_copy and is_foreign):
            if is_foreign:
                self._foreign.move_to_end(fingerprint)
            return arena
        its = next((layout for layout in opened.layouts if layout.fingerprint == fingerprint), None)
        if its is None or opened.is_copy or not self._can_be_cut(its):  # of a copy nobody says which blocks to cut
            raise Refusal("no_layout", f"no engine beside {self._name} has this layout")
        self._make_room(frozenset(opened.fingerprints))
        arena = self._pool.arena(its)
        self._foreign[fingerprint] = None
        return arena

    def _make_room(self, needed: frozenset[bytes]) -> None:
        """Where there are enough foreign arenas, give up the one that nothing is in and that was used longest ago.

        Its senders describe the layout again after one transfer that is refused with `no_layout`.

        Raises:
            Refusal: every one is in use, or needed.
        """
        if len(self._foreign) < self._max_foreign:
            return
        dropped = next((its for its in self._foreign if its not in needed and self._pool.drop(its)), None)
        if dropped is None:
            raise Refusal("no_memory", f"{self._max_foreign} layouts of other tensor-parallel sizes are in use")
        del self._foreign[dropped]

    def _can_be_cut(self, theirs: Layout) -> bool:
        """Whether engines here have the model, none of them in as many ranks; that nothing is in the way is known."""
        ours = self._of_model(theirs.model)
        return bool(ours) and all(our.shard.size != theirs.shard.size for our in ours)


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
