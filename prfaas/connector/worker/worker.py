"""The connector beside one rank's model: copies what the step names, layer by layer, and says so in the ring."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prfaas import logs
from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.connector.metadata import Copy, Counts, Save, Step
from prfaas.connector.worker.copy_host import Copier, LayerBlocks
from prfaas.errors import LayoutError
from prfaas.kv.layout import Layout

# An agent without `peers` answers within a millisecond. One that asks them first is waited for in vain, once; until it has
# answered, steps run without copies, and the agent keeps what the scheduler's side claims meanwhile.
REATTACH_WAIT_SECONDS = 0.02
_log = logs.get("connector.worker")


@dataclass(frozen=True)
class Loaded:
    """What has ended since the last look: loads (`failed` is a part of `finished`) and copies that finished requests left."""

    finished: frozenset[str]
    failed: frozenset[str]
    stored: frozenset[str]  # finished requests whose blocks have been copied


_NOTHING = Loaded(frozenset(), frozenset(), frozenset())


class WorkerSide:
    """All copies of one rank. Runs on the model's thread; a copier may call back from another one."""

    def __init__(
        self,
        client: AgentClient,
        layers: Mapping[str, LayerBlocks],
        layout: Layout,
        *,
        make_copier: Callable[[AgentClient], Copier],
    ) -> None:
        """`make_copier` makes the copier for the arena that the client has mapped, anew for each agent.

        Raises:
            LayoutError: nothing of the first one can be pinned, which its copier needs.
        """
        self._client = client
        self._make_copier = make_copier
        self._layers = layers
        self._by_group = _names_by_group(layers)
        self._linear = {name for name, its in layers.items() if layout.groups[its.group].is_state}
        self._rank = layout.shard.rank
        self._step = Step()
        self._pending: dict[str, list[tuple[Save, Copy]]] = {}  # layer → what it still has to copy, and for which save
        self._unpushed: deque[RingEntry] = deque()  # what the ring had no room for, in order; the copier's to change
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._stored: set[str] = set()
        self.tally = Counts()
        self._take_arena()
        if self._copier.is_unpinned:  # with a later arena the engine goes on, and waits for its copies
            self.close()
            raise LayoutError("no memory of the arena can be pinned")

    def _take_arena(self) -> None:
        self._copier = self._make_copier(self._client)
        self._generations = self._client.slot_generations()
        self._epoch = self._client.attached.epoch
        self._session = 0  # of the scheduler's connections to this agent, the latest of which a step has run

    @property
    def linear_layers(self) -> Collection[str]:
        """Layers whose end no hook of the engine reports."""
        return self._linear

    @property
    def awaits_layers(self) -> bool:
        """Whether any layer has something to copy when it ends."""
        return bool(self._pending)

    @property
    def has_backlog(self) -> bool:
        """Whether the agent's ring had no room for all that it is to be told: the next step says it.

        On a GPU a step's own words are tried once its copies are made, which is not known of here before the next step's end.
        """
        return bool(self._unpushed)

    def begin_step(self, step: Step) -> None:
        """Take the copies of the step that is about to run."""
        if step.epoch != self._epoch:
            self._follow()
        self._step = step if step.epoch == self._epoch else step.without_copies()
        for request_id in self._step.failed_loads:
            self._fail(request_id)
        self._pending = {}
        if self._unpushed:
            self.tally.ring_overflows += 1
        for save in self._step.saves:
            for its in (copy for span in save.spans for copy in span.copies(self._rank)):
                for name in self._by_group[its.span.group]:
                    self._pending.setdefault(name, []).append((save, its))

    def _follow(self) -> None:
        """Meet the next agent once this one has gone: the scheduler has met another one, which may have gone too meanwhile.

        An agent that hangs has not gone, though the scheduler may have left it for the next one: until it ends, steps run
        without copies.
        """
        self._client.poll()
        if not self._client.connected and self._client.reattach(self._leave_arena, wait_seconds=REATTACH_WAIT_SECONDS):
            self._take_arena()

    def _leave_arena(self) -> None:
        """End the copies of the agent that is gone; what they had to say is of no use to the next one."""
        self._copier.close()
        self._generations.release()
        self._unpushed.clear()

    def _fail(self, request_id: str) -> None:
        with self._lock:
            self._finished.add(request_id)
            self._failed.add(request_id)

    def on_layer_end(self, name: str) -> None:
        """A layer has written its KV of this step: copy it out and say so."""
        todo = self._pending.pop(name, None)
        if todo is None:
            return
        layer = self._layers[name]
        entries = [self._save(layer, save.handle, its) for save, its in todo]
        self._copier.then_saved(partial(self._push, entries))

    def _save(self, layer: LayerBlocks, handle: int, its: Copy) -> RingEntry:
        span = its.span
        self.tally.copied_bytes["send"] += self._copier.save(layer, span.block_ids, its.slots)
        return RingEntry(
            EntryKind.LAYER_READY,
            handle,
            group=span.group,
            layer=layer.layer,
            first_block=span.first,
            num_blocks=len(span.block_ids),
        )

    def on_forward_end(self) -> None:
        """All layers have run: save those that nobody reported, and mark the end of the pass."""
        for name in list(self._pending):
            if name in self._linear:
                late = sum(save.is_sent for save, _ in self._pending[name])
                self.tally.state_tail_bytes += late * self._layers[name].slice.payload_bytes
            self.on_layer_end(name)
        step = self._step
        is_back = step.session != self._session and step.epoch == self._epoch
        if step.saves or step.ends or is_back or self._unpushed:
            self._report(step, is_back=is_back)

    def _report(self, step: Step, *, is_back: bool) -> None:
        """Say what the step has ended, once its copies are made."""
        entries = [RingEntry(EntryKind.FORWARD_ENDED, save.handle, group=int(save.last)) for save in step.saves]
        over = [*(save.handle for save in step.saves if save.last), *step.ends]
        entries += [RingEntry(EntryKind.REQUEST_ENDED, handle) for handle in over]
        if is_back:
            self._session = step.session
            entries.append(RingEntry(EntryKind.SCHEDULER_BACK, self._session))
        if entries or self._unpushed:
            self._copier.then_saved(partial(self._push, entries))
        released = [save.release for save in step.saves if save.release is not None]
        if released:
            self._copier.then_saved(partial(self._release, released))
        self._copier.fence()  # now: the next step may zero blocks that it gives away before it calls any hook

    def _release(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            self._stored.update(request_ids)

    def _push(self, entries: Iterable[RingEntry]) -> None:
        """Tell the agent; what the ring has no room for goes first next time, at the latest with the next step."""
        ring = self._client.ring
        was_full = bool(self._unpushed)
        self._unpushed.extend(entries)
        while self._unpushed and ring is not None and ring.push(self._unpushed[0]):
            self._unpushed.popleft()
        if self._unpushed and not was_full:
            _log.warning("ring.full", num_entries=len(self._unpushed))

    def start_loads(self) -> None:
        """Copy received slots into the engine's blocks."""
        for load in self._step.loads:
            if any(len(span.slots) <= self._rank for span in load.spans):
                _log.error("load.refused", request=load.request_id, why="it names no slots of this rank")
                self._fail(load.request_id)
                continue
            copies = [copy for span in load.spans for copy in span.copies(self._rank)]
            for its in copies:
                for name in self._by_group[its.span.group]:
                    copied = self._copier.load(self._layers[name], its.span.block_ids, its.slots)
                    self.tally.copied_bytes["receive"] += copied
            self._copier.then_loaded(partial(self._finish, load.request_id, copies))

    def _finish(self, request_id: str, copies: Sequence[Copy]) -> None:
        moved = any(self._moved(copy) for copy in copies)
        with self._lock:
            self._finished.add(request_id)
            if moved:
                self._failed.add(request_id)

    def _moved(self, its: Copy) -> bool:
        """Whether a slot was given to another block while it was read."""
        return any(self._generations[slot] != then for slot, then in zip(its.slots, its.generations, strict=True))

    def take_loaded(self) -> Loaded:
        """Which loads have ended since the last call."""
        if not (self._finished or self._stored):
            return _NOTHING
        with self._lock:
            result = Loaded(frozenset(self._finished), frozenset(self._failed), frozenset(self._stored))
            for its in (self._finished, self._failed, self._stored):
                its.clear()
        return result

    def close(self) -> None:
        """End all copies and leave the agent."""
        self._copier.close()
        self._generations.release()
        self._client.close()


def _names_by_group(layers: Mapping[str, LayerBlocks]) -> dict[int, Sequence[str]]:
    names: dict[int, list[str]] = {}
    for name, its in layers.items():
        names.setdefault(its.group, []).append(name)
    return {group: tuple(its) for group, its in names.items()}
