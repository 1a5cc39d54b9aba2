"""Worker side of the connector: copies the blocks of each step layer by layer, and reports them in the ring."""

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

# An agent replies within milliseconds. Until it has replied, steps run without copies, and the agent keeps what the
# scheduler side claims.
REATTACH_WAIT_SECONDS = 0.02
FLUSH_INTERVAL_SECONDS = 0.005  # Between two attempts to write to a full ring.
_log = logs.get("connector.worker")


@dataclass(frozen=True)
class CopyResults:
    """Requests whose copies have ended since the last call: loads, failed loads among them, and finished requests."""

    loaded: frozenset[str]
    failed: frozenset[str]
    stored: frozenset[str]


_NO_RESULTS = CopyResults(frozenset(), frozenset(), frozenset())


class WorkerSide:
    """All copies of one rank. Runs on the model's thread; a copier may call back on another thread."""

    def __init__(
        self,
        client: AgentClient,
        layers: Mapping[str, LayerBlocks],
        layout: Layout,
        *,
        make_copier: Callable[[AgentClient], Copier],
        is_writer: bool = True,
        is_layerwise: bool = True,
    ) -> None:
        """Map the agent's arena. `make_copier` is called again for each later agent.

        A worker that is no writer has the same KV as another one, which saves the blocks for both. With `is_layerwise`
        blocks for other agents are copied at the end of each layer; all others are copied at the end of a step.

        Raises:
            LayoutError: The copier needs pinned memory, and none can be pinned.
        """
        self._client = client
        self._make_copier = make_copier
        self._layers = layers
        self._rank = layout.shard.rank
        self._is_writer = is_writer
        self._is_layerwise = is_layerwise
        self._names_by_group: dict[int, list[str]] = {}
        for name, layer in layers.items():
            self._names_by_group.setdefault(layer.group, []).append(name)
        self.linear_layers: Collection[str] = {
            name for name, layer in layers.items() if layout.groups[layer.group].is_state
        }
        self._step = Step()
        self._pending: dict[str, list[tuple[Save, Copy]]] = {}  # Copies of the step by layer.
        self._streamed: set[str] = set()  # Layers of the step that are copied when they end.
        self._backlog: deque[RingEntry] = deque()  # Entries for which the ring had no room, in order.
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._stored: set[str] = set()
        self.counts = Counts()
        self._take_arena()
        if self._copier.is_unpinned:
            # The arena of a later agent may stay unpinned: a running engine rather waits for its copies than stops.
            self.close()
            raise LayoutError("no memory of the arena can be pinned")

    def _take_arena(self) -> None:
        self._copier = self._make_copier(self._client)
        self._generations = self._client.slot_generations()
        self._epoch = self._client.attached.epoch
        self._session = 0  # Latest connection of the scheduler to this agent that a step has named.

    @property
    def awaits_layers(self) -> bool:
        """True if any layer has something to copy when it ends."""
        return bool(self._streamed)

    def begin_step(self, step: Step) -> None:
        """Take the copies of the step that is about to run."""
        if step.epoch != self._epoch:
            self._follow_scheduler()
        self._step = step if step.epoch == self._epoch else step.without_copies()
        for request_id in self._step.failed_loads:
            self._finish_load(request_id, has_failed=True)
        self._pending = {}
        self._streamed.clear()
        for save in self._step.saves if self._is_writer else ():
            for copy in (copy for span in save.spans for copy in span.copies(self._rank)):
                names = self._names_by_group[copy.span.group]
                for name in names:
                    self._pending.setdefault(name, []).append((save, copy))
                if save.is_sent and self._is_layerwise:
                    self._streamed.update(names)

    def _follow_scheduler(self) -> None:
        """Attach to the next agent if this connection is lost, since the scheduler has attached to another one.

        An agent that hangs is not gone, although the scheduler may have left it. Until it ends, steps run without copies.
        """
        self._client.poll()
        if not self._client.connected and self._client.reattach(self._leave_arena, wait_seconds=REATTACH_WAIT_SECONDS):
            self._take_arena()

    def _leave_arena(self) -> None:
        """End the copies for the lost agent. The next agent has no use for their entries."""
        self._copier.close()
        self._generations.release()
        with self._lock:
            self._backlog.clear()

    def on_layer_end(self, name: str) -> None:
        """Copy the blocks that a layer has written in this step, and report them, if any of them travels by layer."""
        if name in self._streamed:
            self._save_layer(name)

    def _save_layer(self, name: str) -> None:
        copies = self._pending.pop(name, None)
        if copies is None:
            return
        layer = self._layers[name]
        entries = [self._save(layer, save.handle, copy) for save, copy in copies]
        self._copier.then_saved(partial(self._push, entries))

    def _save(self, layer: LayerBlocks, handle: int, copy: Copy) -> RingEntry:
        span = copy.span
        self.counts.copied_bytes["send"] += self._copier.save(layer, span.block_ids, copy.slots)
        return RingEntry(
            EntryKind.LAYER_READY,
            handle,
            group=span.group,
            layer=layer.layer,
            first_block=span.first,
            num_blocks=len(span.block_ids),
        )

    def on_forward_end(self) -> None:
        """Copy the layers that no hook reported, and report the end of the forward pass."""
        for name in list(self._pending):
            if name in self.linear_layers:
                num_sent = sum(save.is_sent for save, _ in self._pending[name])
                self.counts.state_tail_bytes += num_sent * self._layers[name].slice.payload_bytes
            self._save_layer(name)
        step = self._step
        is_new_session = step.session != self._session and step.epoch == self._epoch
        if step.saves or step.ends or is_new_session:
            self._report(step, is_new_session=is_new_session)

    def _report(self, step: Step, *, is_new_session: bool) -> None:
        entries = [RingEntry(EntryKind.FORWARD_ENDED, save.handle, group=int(save.last)) for save in step.saves]
        ended = [*(save.handle for save in step.saves if save.last), *step.ends]
        entries += [RingEntry(EntryKind.REQUEST_ENDED, handle) for handle in ended]
        if is_new_session:
            self._session = step.session
            entries.append(RingEntry(EntryKind.SCHEDULER_REATTACHED, self._session))
        if entries and self._is_writer:
            self._copier.then_saved(partial(self._push, entries))
        released = [save.release for save in step.saves if save.release is not None]
        if released:
            self._copier.then_saved(partial(self._release, released))
        # The fence comes now: the next step may zero blocks that it gives away before it calls any hook.
        self._copier.fence()

    def _release(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            self._stored.update(request_ids)

    def _push(self, entries: Iterable[RingEntry]) -> None:
        """Write entries to the ring. If it has no room, a thread tries again until the agent reads them or is gone."""
        with self._lock:
            was_full = bool(self._backlog)
            self._backlog.extend(entries)
            if was_full or self._flush():
                return
            self.counts.ring_overflows += 1
        _log.warning("ring.overflow_started")
        threading.Thread(target=self._flush_later, name="prfaas-ring", daemon=True).start()

    def _flush(self) -> bool:
        """Write the backlog as far as the ring has room; return whether nothing is left."""
        ring = self._client.ring
        while self._backlog and ring is not None and ring.push(self._backlog[0]):
            self._backlog.popleft()
        return not self._backlog

    def _flush_later(self) -> None:
        is_done = False
        while not is_done and not self._is_closed.wait(FLUSH_INTERVAL_SECONDS):
            with self._lock:
                is_done = self._flush()

    def start_loads(self) -> None:
        """Copy received slots into the engine's blocks."""
        for load in self._step.loads:
            if any(len(span.slots) <= self._rank for span in load.spans):
                _log.error("load.slots_missing", request_id=load.request_id, rank=self._rank)
                self._finish_load(load.request_id, has_failed=True)
                continue
            copies = [copy for span in load.spans for copy in span.copies(self._rank)]
            for copy in copies:
                for name in self._names_by_group[copy.span.group]:
                    copied = self._copier.load(self._layers[name], copy.span.block_ids, copy.slots)
                    self.counts.copied_bytes["receive"] += copied
            self._copier.then_loaded(partial(self._check_load, load.request_id, copies))

    def _check_load(self, request_id: str, copies: Sequence[Copy]) -> None:
        self._finish_load(request_id, has_failed=any(self._is_overwritten(copy) for copy in copies))

    def _is_overwritten(self, copy: Copy) -> bool:
        """Return whether a slot was given to another block while it was read."""
        expected = zip(copy.slots, copy.generations, strict=True)
        return any(self._generations[slot] != generation for slot, generation in expected)

    def _finish_load(self, request_id: str, *, has_failed: bool) -> None:
        with self._lock:
            self._loaded.add(request_id)
            if has_failed:
                self._failed.add(request_id)

    def take_results(self) -> CopyResults:
        """Return the requests whose copies have ended since the last call."""
        if not (self._loaded or self._stored):
            return _NO_RESULTS
        with self._lock:
            results = CopyResults(frozenset(self._loaded), frozenset(self._failed), frozenset(self._stored))
            for request_ids in (self._loaded, self._failed, self._stored):
                request_ids.clear()
        return results

    def close(self) -> None:
        """End all copies and leave the agent."""
        self._is_closed.set()
        self._copier.close()
        self._generations.release()
        self._client.close()
