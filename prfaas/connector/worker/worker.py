"""Worker side of the connector: copies the blocks of each step layer by layer, and reports them in the ring."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prfaas import logs
from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.connector.block_map import BlockSpan
from prfaas.connector.counts import Counts
from prfaas.connector.metadata import Copy, Save, Step
from prfaas.connector.settings import DEFAULT_STAGING_BYTES
from prfaas.connector.worker.copy_cuda import Copier, CopyBatch, copier_for
from prfaas.connector.worker.copy_host import BlockPairs, LayerBlocks, LayerCopy
from prfaas.kv.layout import Layout, siblings
from prfaas.kv.parts import piece_of

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


@dataclass
class _GroupSaves:
    """Saves of one KV group in a step. All layers of the group have the same blocks and slots."""

    pairs: BlockPairs = field(default_factory=BlockPairs)
    num_sent: int = 0  # Copies for other agents.
    _spans: list[tuple[int, BlockSpan]] = field(default_factory=list)  # With the handle of the transfer.

    def add(self, save: Save, copy: Copy) -> None:
        self.pairs.add(copy.span.block_ids, copy.slots)
        self.num_sent += save.is_sent
        self._spans.append((save.handle, copy.span))

    def entries(self, layer: int) -> Iterator[RingEntry]:
        """Yield the entries that report a layer."""
        for handle, span in self._spans:
            yield RingEntry(
                EntryKind.LAYER_READY,
                handle,
                group=span.group,
                layer=layer,
                first_block=span.first,
                num_blocks=len(span.block_ids),
            )


def _num_bytes(copies: Sequence[LayerCopy]) -> int:
    return sum(layer.slice.payload_bytes * len(pairs.slots) for layer, pairs in copies)


_SourceCopy = tuple[int, Copy]  # With the number of the arena.


@dataclass(frozen=True)
class _Source:
    """Arena from which a rank loads, by number of its rank in the engine, with the layers of each group that it has."""

    rank: int
    layers: Mapping[int, Sequence[LayerBlocks]]

    @classmethod
    def of(cls, arena: int, layout: Layout, own: Mapping[str, LayerBlocks]) -> _Source:
        """Return the rank's own arena (0), with all layers, or a sibling's, with the pieces of `own` layers there."""
        found: dict[int, list[LayerBlocks]] = {}
        for layer in own.values():
            slice_ = layout.groups[layer.group].layers[layer.layer]
            if not arena:
                found.setdefault(layer.group, []).append(layer)
            elif piece_of(slice_)[1] > 1:
                found.setdefault(layer.group, []).append(layer.of_sibling(slice_, arena))
        return cls(layout.shard.rank, found)


def _is_overwritten(copy: Copy, generations: Sequence[int]) -> bool:
    """Return whether a slot was given to another block while it was read."""
    expected = zip(copy.slots, copy.generations, strict=True)
    return any(generations[slot] != generation for slot, generation in expected)


_NO_RESULTS = CopyResults(frozenset(), frozenset(), frozenset())


class WorkerSide:
    """All copies of one rank. Runs on the model's thread; a copier may call back on another thread."""

    def __init__(
        self,
        client: AgentClient,
        layers: Mapping[str, LayerBlocks],
        layout: Layout,
        *,
        copy_batch: CopyBatch | None = None,
        is_writer: bool = True,
        is_layerwise: bool = True,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        """Map the agent's arena. Blocks in GPU memory need `copy_batch`.

        A worker that is no writer has the same KV as another one, which saves the blocks for both. With `is_layerwise`
        blocks for other agents are copied at the end of each layer; all others are copied at the end of a step.
        States beyond `staging_bytes` that wait for their copy are not saved.
        """
        self._client = client
        self._copy_batch = copy_batch
        self._layers = layers
        self._layout = layout
        self._rank = layout.shard.rank
        self._is_writer = is_writer
        self._is_layerwise = is_layerwise
        self._names_by_group: dict[int, list[str]] = {}
        for name, layer in layers.items():
            self._names_by_group.setdefault(layer.group, []).append(name)
        self._sources = [_Source.of(arena, sibling, layers) for arena, sibling in enumerate(siblings(layout))]
        self.linear_layers: Collection[str] = {
            name for name, layer in layers.items() if layout.groups[layer.group].is_state
        }
        self._step = Step()
        self._saves: dict[int, _GroupSaves] = {}  # Saves of the step by group.
        self._pending: list[str] = []  # Layers of the step that are not copied yet.
        self._streamed: set[str] = set()  # Pending layers that are copied when they end.
        self._staging_bytes = staging_bytes
        self._num_staged_bytes = 0  # States that wait for their copy.
        self._step_staged_bytes = 0  # Those of the step.
        self._backlog: deque[RingEntry] = deque()  # Entries for which the ring had no room, in order.
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._stored: set[str] = set()
        self._saved_steps: list[int] = []
        self.counts = Counts()
        self._take_arena()

    def _take_arena(self) -> None:
        device = next(iter(self._layers.values())).pages.device
        self._copier: Copier = copier_for(self._client, self._layout, device=device, copy_batch=self._copy_batch)
        self._state_bytes: dict[int, int] = {}  # Bytes to stage for a state of each group whose states are overwritten.
        for layer in self._layers.values():
            if layer.is_overwritten and self._copier.stages_states:
                self._state_bytes[layer.group] = self._state_bytes.get(layer.group, 0) + layer.slice.payload_bytes
        self._generations = [self._client.slot_generations(arena) for arena in range(len(self._sources))]
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
        self._saves = {}
        self._pending = []
        self._streamed = set()
        self._free_staging(self._step_staged_bytes)
        self._step_staged_bytes = 0
        for save in self._step.saves if self._is_writer else ():
            for copy in self._stage(save, [copy for span in save.spans for copy in span.copies(self._rank)]):
                self._saves.setdefault(copy.span.group, _GroupSaves()).add(save, copy)
        for group, saves in self._saves.items():
            self._pending += self._names_by_group[group]
            if self._is_layerwise and saves.num_sent:
                self._streamed.update(self._names_by_group[group])

    def _stage(self, save: Save, copies: Sequence[Copy]) -> Sequence[Copy]:
        """Take memory for the states among the copies of a save, or return the other copies if too many states wait."""
        num_bytes = sum(self._state_bytes.get(copy.span.group, 0) * len(copy.slots) for copy in copies)
        with self._lock:
            waiting_bytes = self._num_staged_bytes
            if not waiting_bytes or not num_bytes or waiting_bytes + num_bytes <= self._staging_bytes:
                self._num_staged_bytes += num_bytes
                self._step_staged_bytes += num_bytes
                return copies
        _log.warning("states.staging_full", handle=save.handle, num_bytes=num_bytes, staging_bytes=self._staging_bytes)
        return [copy for copy in copies if copy.span.group not in self._state_bytes]

    def _free_staging(self, num_bytes: int) -> None:
        with self._lock:
            self._num_staged_bytes -= num_bytes

    def _follow_scheduler(self) -> None:
        """Attach to the next agent if this connection is lost, since the scheduler has attached to another one.

        An agent that hangs is not gone, although the scheduler may have left it. Until it ends, steps run without copies.
        """
        self._client.poll()
        if not self._client.connected and self._client.reattach(self._leave_arena, wait_seconds=REATTACH_WAIT_SECONDS):
            self._take_arena()

    def _leave_arena(self) -> None:
        """End the copies for the lost agent. The next agent has no use for their entries."""
        self._release_arenas()
        with self._lock:
            self._backlog.clear()

    def on_layer_end(self, name: str) -> None:
        """Copy the blocks that a layer has written in this step, and report them, if any of them travels by layer."""
        if name in self._streamed:
            self._streamed.discard(name)
            self._pending.remove(name)
            self._save([name])

    def _save(
        self, names: Sequence[str], entries: Sequence[RingEntry] = (), done: Callable[[], None] = lambda: None
    ) -> None:
        """Copy these layers, then write their entries and `entries` to the ring, then call `done`."""
        layers = [self._layers[name] for name in names]
        copies = [(layer, self._saves[layer.group].pairs) for layer in layers]
        ready = [entry for layer in layers for entry in self._saves[layer.group].entries(layer.layer)]
        self.counts["bytes send"] += _num_bytes(copies)

        def report() -> None:
            if (ready or entries) and self._is_writer:
                self._push([*ready, *entries])
            done()

        self._copier.save(copies, report)

    def on_forward_end(self) -> None:
        """Copy the layers that no hook reported, and report the end of the forward pass."""
        step = self._step
        for name in self._pending:
            if name in self.linear_layers:
                num_sent = self._saves[self._layers[name].group].num_sent
                self.counts["state_tail_bytes"] += num_sent * self._layers[name].slice.payload_bytes
        is_new_session = step.session != self._session and step.epoch == self._epoch
        if not (step.saves or step.ends or is_new_session):
            return
        entries = [RingEntry(EntryKind.FORWARD_ENDED, save.handle, group=int(save.last)) for save in step.saves]
        ended = [*(save.handle for save in step.saves if save.last), *step.ends]
        entries += [RingEntry(EntryKind.REQUEST_ENDED, handle) for handle in ended]
        if is_new_session:
            self._session = step.session
            entries.append(RingEntry(EntryKind.SCHEDULER_REATTACHED, self._session))
        names, self._pending = self._pending, []
        self._streamed = set()
        self._save(names, entries, partial(self._end_saves, step, self._step_staged_bytes))
        self._step_staged_bytes = 0

    def _end_saves(self, step: Step, num_staged_bytes: int) -> None:
        """Note that the engine may reuse the blocks of a step's saves."""
        self._free_staging(num_staged_bytes)
        with self._lock:
            self._stored.update(save.release for save in step.saves if save.release is not None)
            if step.number:
                self._saved_steps.append(step.number)

    def _push(self, entries: Iterable[RingEntry]) -> None:
        """Write entries to the ring. If it has no room, a thread tries again until the agent reads them or is gone."""
        with self._lock:
            was_full = bool(self._backlog)
            self._backlog.extend(entries)
            if was_full or self._flush():
                return
            self.counts["ring_overflows"] += 1
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
        loads: list[tuple[str, list[_SourceCopy]]] = []
        pairs: dict[tuple[int, int], BlockPairs] = {}  # By arena and group.
        for load in self._step.loads:
            copies = [
                (arena, copy)
                for span in load.spans
                for arena, source in enumerate(self._sources)
                if span.span.group in source.layers
                for copy in span.copies(source.rank)
            ]
            loads.append((load.request_id, copies))
            for arena, copy in copies:
                pairs.setdefault((arena, copy.span.group), BlockPairs()).add(copy.span.block_ids, copy.slots)
        if loads:
            layers = [
                (layer, found)
                for (arena, group), found in pairs.items()
                for layer in self._sources[arena].layers[group]
            ]
            self.counts["bytes receive"] += _num_bytes(layers)
            self._copier.load(layers, partial(self._check_loads, loads))

    def _check_loads(self, loads: Sequence[tuple[str, Sequence[_SourceCopy]]]) -> None:
        for request_id, copies in loads:
            has_failed = any(_is_overwritten(copy, self._generations[arena]) for arena, copy in copies)
            self._finish_load(request_id, has_failed=has_failed)

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

    def take_saved_steps(self) -> list[int]:
        """Return the numbers of the steps whose saves have ended since the last call."""
        with self._lock:
            numbers, self._saved_steps = self._saved_steps, []
        return numbers

    def close(self) -> None:
        """End all copies and leave the agent."""
        self._is_closed.set()
        self._release_arenas()
        self._client.close()

    def _release_arenas(self) -> None:
        self._copier.close()
        for generations in self._generations:
            generations.release()
