"""The worker's half of the connector: carries out a step's copies and says on the ring what is ready."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from prfaas import logs
from prfaas.agent.client import AgentClient
from prfaas.agent.ring import EntryKind, RingEntry
from prfaas.cachepool.layout import Layout
from prfaas.connector.blocks import Copier, make_copier, slots_as_rows
from prfaas.connector.step_work import BlockPairs, LoadWork, SaveWork, StepWork

_log = logs.get("connector.worker")


class WorkerSide:
    """One rank's copies. Everything but the ring is touched by the model's thread alone."""

    def __init__(
        self, client: AgentClient, layout: Layout, rows: Mapping[str, torch.Tensor], places: Mapping[str, tuple[int, int]]
    ) -> None:
        """`rows[layer]` are the engine's blocks as bytes, `places[layer]` its (group, place in the group)."""
        self._client = client
        self._rank = layout.shard.rank
        self._layout = layout
        self._rows = rows
        self._places = places
        attached = client.attached
        slots = slots_as_rows(
            client.arena,
            header_bytes=attached.header_bytes,
            slot_bytes=attached.slot_bytes,
            num_slots=attached.num_slots,
        )
        self._copier: Copier = make_copier(slots, next(iter(rows.values())).device)
        self._generations = client.slot_generations()
        self._handles: dict[str, int] = {}  # requests that this worker has saved something of
        self._saved: set[str] = set()  # layers saved in this step already
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self.ring_overflows = 0

    def begin_step(self, work: StepWork) -> None:
        """A step begins: what the last one still reads must not be overwritten by it."""
        self._copier.fence()
        self._saved.clear()
        for save in work.saves:
            self._handles[save.request_id] = save.handle

    def save_layer(self, work: StepWork, name: str) -> None:
        """A layer of this step has been computed: its whole blocks leave."""
        place = self._places.get(name)
        if place is None or name in self._saved:
            return
        self._saved.add(name)
        for save in work.saves:
            for pairs in save.pairs:
                if pairs.group == place[0] and pairs.block_ids:
                    self._save(save, pairs, name, place[1])

    def _save(self, save: SaveWork, pairs: BlockPairs, name: str, layer: int) -> None:
        entry = RingEntry(
            EntryKind.LAYER_READY,
            save.handle,
            group=pairs.position,
            layer=layer,
            first_block=pairs.first_block,
            num_blocks=len(pairs.block_ids),
        )
        offset = self._layout.groups[pairs.group].layers[layer].offset_bytes
        done = partial(self._push, entry)
        self._copier.gather(self._rows[name], pairs.block_ids, pairs.slots[self._rank], offset=offset, done=done)

    def _push(self, entry: RingEntry) -> None:
        ring = self._client.ring
        if ring is None or not ring.push(entry):
            self.ring_overflows += 1
            _log.warning("ring.full", handle=entry.handle, overflows=self.ring_overflows)

    def end_step(self, work: StepWork) -> None:
        """The forward pass has ended: layers without a hook of their own (recurrent states) leave."""
        for save in work.saves:
            entry = RingEntry(EntryKind.FORWARD_ENDED, save.handle, group=int(save.last))
            self._push(entry)
        if work.saves:
            for name in self._rows:
                self.save_layer(work, name)

    def load(self, loads: Iterable[LoadWork]) -> None:
        """Fill engine blocks from slots; a slot that was given away meanwhile fails its request."""
        loads = list(loads)
        for load in loads:
            for pairs in load.pairs:
                group = self._layout.groups[pairs.group]
                for layer in group.layers:
                    slots = pairs.slots[self._rank]
                    self._copier.scatter(self._rows[layer.name], pairs.block_ids, slots, offset=layer.offset_bytes)
        if loads:
            self._copier.loaded()
        for load in loads:
            self._loaded.add(load.request_id)
            if not self._intact(load):
                self._failed.add(load.request_id)
                _log.warning("load.moved", request=load.request_id)

    def _intact(self, load: LoadWork) -> bool:
        """Whether every slot still was the block's after the copy."""
        return all(
            self._generations[slot] == generation
            for pairs, generations in zip(load.pairs, load.generations, strict=True)
            for slot, generation in zip(pairs.slots[self._rank], generations[self._rank], strict=True)
        )

    def take_results(self, finished: Iterable[str]) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them that failed; also tells the agent which sends have ended."""
        for request_id in finished:
            handle = self._handles.pop(request_id, None)
            if handle is not None:
                self._copier.after_gathers(partial(self._push, RingEntry(EntryKind.REQUEST_ENDED, handle)))
        loaded, failed = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def close(self) -> None:
        self._copier.close()
        self._client.close()
