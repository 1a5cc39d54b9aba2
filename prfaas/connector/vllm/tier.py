"""PrfaasTier: a secondary tier of vLLM's OffloadingConnector that keeps chunks in the pool of this machine's agent.

vLLM names a chunk by its own hash of all tokens up to the chunk's end. These names are opaque keys here: they are hashed
together with all that vLLM tells a tier of a chunk's bytes. The attention backend is not told, so engines of one machine
with unlike backends need unlike names of their `model`.

    lookup        FindBlocks at the end of the step; RETRY until BlocksFound
    submit_store  Store ──▶ SendOpened; a thread copies the chunks into slots; the ring tells the agent
    submit_load   Hold ──▶ ReceiveReady; a thread copies the slots and compares generations; Release

vLLM calls every method on the scheduler's thread. Only `drain_jobs` waits.
"""

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from prfaas import logs
from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import (
    HELD,
    Alive,
    BlocksFound,
    FindBlocks,
    Forget,
    Forgotten,
    Hold,
    Message,
    ReceiveReady,
    Release,
    SendOpened,
    Store,
    TransferFailed,
)
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.connector import settings
from prfaas.connector.scheduler.liveness import HEARTBEAT_SECONDS, AgentLiveness
from prfaas.connector.vllm.kv_layout import packing
from prfaas.errors import ConfigError
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import OPAQUE_PACKING, Layout
from prfaas.kv.parts import LayerSlice
from prfaas.types import BlockHash, GroupBlocks, Shard, TransferId

SETTINGS = ("agent_socket", "model", "silence_seconds")
DRAIN_SECONDS = 30.0
# Fields of vLLM's OffloadingConfig that say nothing about a chunk's bytes.
_OF_THE_PROCESS = ("enable_kv_cache_events", "extra_config", "engine_id")
_OF_THE_REPLICA = ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local")
_log = logs.get("connector.tier")


@dataclass
class _Lookups:
    """State of one request: verdicts by key, None while one is awaited, and hashes of chunks by group and number."""

    held: dict[OffloadKey, bool | None] = field(default_factory=dict)
    hashes: dict[tuple[int, int], BlockHash] = field(default_factory=dict)


@dataclass(eq=False)
class _Job:
    """A job of vLLM, with its chunks in the order of the message to the agent."""

    job: TransferJob
    chunk_ids: list[int]
    copy: Future[bool] | None = None
    reports: list[RingEntry] = field(default_factory=list)  # Not in the ring yet.


class PrfaasTier(SecondaryTierManager):
    """Tier whose chunks outlive the engine, and which the engines of a machine share."""

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **tier_settings: Any,
    ) -> None:
        """Attach to the agent. `tier_settings` are the keys of the tier's configuration.

        Raises:
            ConfigError: A setting is unknown or wrong.
            LayoutError: The agent refuses this engine.
            AgentUnreachable: Nobody answers at `agent_socket`.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if unknown := sorted(tier_settings.keys() - set(SETTINGS)):
            raise ConfigError(f"secondary_tiers {tier_type}: {unknown[0]} is unknown; write {', '.join(SETTINGS)}")
        logs.setup("connector", logger="prfaas")
        found = settings.read(tier_settings)
        config = offloading_spec.config
        self.locality = Locality.LOCAL
        self._model = f"{found.model or config.model.name} chunks {_digest(config, self.block_size_bytes)}"
        self._root = root_hash(self._model)
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups
        }
        chunk = LayerSlice("chunk", 0, self.block_size_bytes, "uint8", "chunk")
        layout = Layout(self._model, OPAQUE_PACKING, Shard(), (KVGroup("full_attention", HASH_UNIT_TOKENS, (chunk,)),))
        path, instance = str(found.agent_socket), f"{config.engine_id}/tier"
        self._worker = AgentClient(path, instance=instance, role="worker", layout=layout)
        try:
            self._client = AgentClient(path, instance=instance, role="scheduler")
        except BaseException:
            self._worker.close()
            raise
        self._liveness = AgentLiveness(self._client.post, silence_seconds=found.silence_seconds)
        self._rows: Any = np.asarray(primary_kv_view).view(np.uint8)
        self._map_slots()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="prfaas-tier")
        self._jobs: dict[TransferId, _Job] = {}
        self._results: list[JobResult] = []
        self._new_keys: list[tuple[OffloadKey, _Lookups]] = []
        self._finds: dict[TransferId, list[tuple[OffloadKey, _Lookups]]] = {}
        self._forgetting: TransferId | None = None  # Until it is answered, the pool may hold KV of earlier weights.

    def _map_slots(self) -> None:
        attached = self._worker.attached
        self._generations = self._worker.slot_generations()
        memory = np.frombuffer(self._worker.arena, np.uint8, offset=attached.header_bytes)
        self._slots: Any = memory.reshape(-1, attached.slot_bytes)[:, : self.block_size_bytes]

    def _unmap_slots(self) -> None:
        self._slots = None
        self._generations.release()

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._is_usable:
            return LookupResult.MISS
        lookups = _lookups(req_context)
        if key not in lookups.held:
            lookups.held[key] = None
            self._new_keys.append((key, lookups))
        is_held = lookups.held[key]
        return LookupResult.RETRY if is_held is None else LookupResult.HIT if is_held else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        asked, self._new_keys = self._new_keys, []
        if not self._is_usable:
            _settle(asked)
        elif asked:
            transfer_id = _new_id()
            self._finds[transfer_id] = asked
            self._client.post(FindBlocks(transfer_id, b"".join(self._hash(key) for key, _ in asked)))

    # Jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, Store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, Hold)

    def _submit(self, job: TransferJob, kind: type[Store] | type[Hold]) -> None:
        if not self._is_usable or not job.keys:
            self._finish(job, is_complete=not job.keys)
            return
        transfer_id, (order, groups) = _new_id(), self._groups(job)
        self._jobs[transfer_id] = _Job(job, order)
        num_tokens = max(blocks.first_block + blocks.num_blocks for blocks in groups) * HASH_UNIT_TOKENS
        self._client.post(kind(transfer_id, num_tokens, groups))

    def _groups(self, job: TransferJob) -> tuple[list[int], tuple[GroupBlocks, ...]]:
        """Return the job's chunk ids in prompt order, and their hashes in runs.

        In the pool a chunk depends on the one before it, so that a prompt loses its end first. Positions only grow along
        such a chain, so no chunk depends on itself.
        """
        lookups = _lookups(job.req_context)
        found = []
        for key, chunk_id in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            group = get_offload_group_idx(key)
            end = job.req_context.get_offload_key_position(key) or 0
            number = max(0, -(-end // self._chunk_tokens.get(group, HASH_UNIT_TOKENS)) - 1)
            found.append((group, number, self._hash(key), chunk_id))
        runs: list[tuple[int, int, list[BlockHash]]] = []
        for group, number, block_hash, _ in sorted(found):
            lookups.hashes[group, number] = block_hash
            if runs and runs[-1][0] == group and runs[-1][1] + len(runs[-1][2]) == number:
                runs[-1][2].append(block_hash)
            else:
                runs.append((group, number, [block_hash]))
        return [chunk_id for *_, chunk_id in sorted(found)], tuple(
            GroupBlocks(0, number, tuple(hashes), lookups.hashes.get((group, number - 1), self._root))
            for group, number, hashes in runs
        )

    def _hash(self, key: OffloadKey) -> BlockHash:
        return BlockHash(hashlib.sha256(self._root + key).digest()[:HASH_BYTES])

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._poll()
        results, self._results = self._results, []
        return results

    def drain_jobs(self) -> None:
        """Wait until no job is left, then have the agent forget all chunks: vLLM drains tiers when weights may change."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._jobs:
            if time.monotonic() > deadline:
                self._give_up()
            self._poll(HEARTBEAT_SECONDS)
        self._forgetting = _new_id()
        self._client.post(Forget(self._forgetting, self._model))
        self._give_up()

    # The agent

    @property
    def _is_usable(self) -> bool:
        is_attached = self._client.connected and self._worker.connected and not self._liveness.is_silent
        return is_attached and self._forgetting is None

    def _poll(self, wait_seconds: float = 0.0) -> None:
        for message in self._client.poll(wait_seconds):
            self._liveness.on_message()
            self._on_message(message)
        if self._jobs or self._finds:
            self._liveness.beat()
        is_attached = self._client.connected and self._worker.poll() == [] and self._worker.connected
        self._end_copies()
        if not is_attached or self._liveness.is_silent:
            self._give_up()
        if not is_attached and not self._jobs:
            self._reattach()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Alive):
            self._liveness.on_alive(message.number)
        elif isinstance(message, Forgotten) and message.transfer_id == self._forgetting:
            self._forgetting = None
        elif isinstance(message, BlocksFound):
            asked = self._finds.pop(message.transfer_id, [])
            _settle(asked, message.held)
        elif isinstance(message, TransferFailed) and message.transfer_id in self._jobs:
            self._end(message.transfer_id, self._jobs[message.transfer_id].job, is_complete=False)
        elif isinstance(message, SendOpened | ReceiveReady) and message.transfer_id in self._jobs:
            self._begin_copy(self._jobs[message.transfer_id], message)

    def _begin_copy(self, job: _Job, message: SendOpened | ReceiveReady) -> None:
        pairs = list(zip(job.chunk_ids, chain(*message.slots[0]), strict=True))
        if isinstance(message, ReceiveReady):
            job.copy = self._copier.submit(self._load, pairs, list(chain(*message.generations[0])))
            return
        job.copy = self._copier.submit(self._store, pairs)
        sizes = [(position, len(slots)) for position, slots in enumerate(message.slots[0])]
        kind, handle = EntryKind.LAYER_READY, message.handle
        job.reports = [RingEntry(kind, handle, group=position, num_blocks=size) for position, size in sizes]
        job.reports.append(RingEntry(EntryKind.REQUEST_ENDED, handle))

    def _store(self, pairs: Iterable[tuple[int, int]]) -> bool:
        for chunk_id, slot in pairs:
            if slot != HELD:
                np.copyto(self._slots[slot], self._rows[chunk_id])
        return True

    def _load(self, pairs: Collection[tuple[int, int]], generations: Iterable[int]) -> bool:
        """Copy slots into chunks; return whether none was given to another block meanwhile."""
        for chunk_id, slot in pairs:
            np.copyto(self._rows[chunk_id], self._slots[slot])
        return all(self._generations[slot] == number for (_, slot), number in zip(pairs, generations, strict=True))

    def _end_copies(self) -> None:
        for transfer_id, job in list(self._jobs.items()):
            if job.copy is None or not job.copy.done():
                continue
            ring = self._worker.ring
            while job.reports and ring is not None and self._worker.connected and ring.push(job.reports[0]):
                del job.reports[0]
            if not job.reports:
                self._end(transfer_id, job.job, is_complete=job.copy.result())

    def _end(self, transfer_id: TransferId, job: TransferJob, *, is_complete: bool) -> None:
        """End a job here and at the agent, which has ended a complete store by itself."""
        del self._jobs[transfer_id]
        if job.is_promotion or not is_complete:
            self._client.post(Release(transfer_id))
        self._finish(job, is_complete=is_complete)

    def _finish(self, job: TransferJob, *, is_complete: bool) -> None:
        """Report the end of a job. After a failed load, its request takes the chunks for absent, else it would retry."""
        if job.is_promotion and not is_complete:
            _lookups(job.req_context).held.update(dict.fromkeys(job.keys, False))
        seconds, num_bytes = time.monotonic() - job.submit_time, len(job.keys) * self.block_size_bytes
        self._results.append(
            JobResult(job.job_id, is_complete, transfer_time=seconds, transfer_bytes=num_bytes if is_complete else None)
        )

    def _give_up(self) -> None:
        """Fail what waits for the agent. Copies that run end by themselves."""
        for asked in self._finds.values():
            _settle(asked)
        self._finds.clear()
        for transfer_id, job in list(self._jobs.items()):
            if job.copy is None or job.copy.done():
                self._end(transfer_id, job.job, is_complete=False)

    def _reattach(self) -> None:
        """Attach again, perhaps to another agent, which may have found forgotten chunks on its SSD."""
        if not self._worker.connected and self._worker.reattach(self._unmap_slots):
            self._map_slots()
        if self._worker.connected and (self._client.connected or self._client.reattach()) and self._worker.ring:
            self._liveness.restart()
            self._worker.ring.push(RingEntry(EntryKind.SCHEDULER_REATTACHED, self._client.attached.session))
            if self._forgetting is not None:
                self._client.post(Forget(self._forgetting, self._model))

    def shutdown(self) -> None:
        self._copier.shutdown(wait=True)
        self._rows = None
        self._unmap_slots()
        self._client.close()
        self._worker.close()


def _new_id() -> TransferId:
    return TransferId(os.urandom(16))


def _lookups(req_context: ReqContext) -> _Lookups:
    """Return the tier's state of a request, which ends with vLLM's object."""
    found: _Lookups | None = req_context.get_state(_Lookups)
    if found is None:
        found = _Lookups()
        req_context.set_state(found)
    return found


def _settle(asked: Collection[tuple[OffloadKey, _Lookups]], held: bytes = b"") -> None:
    """Write the verdicts on these keys; without an answer they are absent."""
    verdicts = held if len(held) == len(asked) else bytes(len(asked))
    for (key, lookups), is_held in zip(asked, verdicts, strict=True):
        lookups.held[key] = bool(is_held)


def _digest(config: Any, chunk_bytes: int) -> str:
    """Return a hash of what vLLM tells of the bytes of a chunk, but the model's name, tokens and extra keys."""
    fields = {name: value for name, value in asdict(config).items() if name not in _OF_THE_PROCESS}
    fields["model"] = config.model.dtype
    fields["parallel"] = {name: value for name, value in fields["parallel"].items() if name not in _OF_THE_REPLICA}
    device = torch.device(current_platform.device_type)
    kernels = packing({}, [], cache_dtype=config.model.dtype, device=device, assumes_plain=False)
    device_name = current_platform.get_device_name()
    text = json.dumps([fields, chunk_bytes, kernels, device_name], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
