"""Prefill worker: computes prompts into blocks that the decode engine has allocated, beside the decode worker.

The worker needs no engine of its own. Each step is a `SchedulerOutput` with new requests only: their block tables, the tokens
that are computed already, and those to compute. The last token of a prompt is left to decode, which samples from it.
"""

import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.colocate.channel import Channel
from prfaas.colocate.cores import all_cores, move_threads, resize_team, team_size
from prfaas.colocate.messages import Cancel, Done, Ping, Ready, UseCores
from prfaas.colocate.prefill_plan import Chunk, GroupShape, Order, PrefillQueue
from prfaas.errors import LayoutError


def run(wrapper: Any, channel: Channel, scratch_blocks: Sequence[int]) -> NoReturn:
    """Compute orders until the decode engine closes the channel."""
    config = wrapper.vllm_config
    orders = PrefillQueue(
        group_shapes(wrapper.worker.model_runner.kv_cache_config),
        config.scheduler_config.max_num_batched_tokens,
        config.scheduler_config.max_num_seqs,
        scratch_blocks,
    )
    inbox = Inbox(channel)
    channel.send(Ready(os.getpid()))
    stepper = Stepper(wrapper)
    while True:
        for message in inbox.take(waits=not orders):
            if isinstance(message, Order):
                orders.add(message)
            elif isinstance(message, Cancel):
                orders.cancel(message.request_id)
                channel.send(Done(message.request_id))
        inbox.apply_cores()
        chunks = orders.next_step()
        if chunks:
            stepper.compute(chunks)
        for chunk in chunks:
            if chunk.is_last:
                channel.send(Done(chunk.order.request_id))


class Inbox:
    """Messages of the decode engine, read by a thread, so that other cores are taken in the middle of a step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._num_threads = 0
        self._cores = self._all_cores = all_cores()
        threading.Thread(target=self._read, name="prfaas-inbox", daemon=True).start()

    def _read(self) -> NoReturn:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, Ping):
                    self._channel.send(message)
                    continue
                if isinstance(message, UseCores):
                    move_threads(message.cores)
                    self._cores = message.cores
                self._messages.put(message)
        except (EOFError, OSError):
            os._exit(0)  # The decode engine is gone, and with it everybody who would read the blocks.

    def take(self, *, waits: bool) -> list[Any]:
        """Return all messages; wait for one if there is nothing to compute."""
        messages = [self._messages.get()] if waits else []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages

    def apply_cores(self) -> None:
        """Adapt the OpenMP team to the cores, between two steps."""
        num_threads = team_size(len(self._cores), len(self._all_cores))
        if self._num_threads != num_threads:
            self._num_threads = num_threads
            resize_team(num_threads)
            move_threads(self._cores)  # Threads that the team has started since.


class Stepper:
    """Runs steps on vLLM's worker."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._finished: set[str] = set()
        self._zeroes = wrapper.worker.model_runner.kv_cache_config.needs_kv_cache_zeroing
        self._is_v2 = wrapper.vllm_config.use_v2_model_runner

    def compute(self, chunks: Sequence[Chunk]) -> float:
        """Compute one step; return its seconds."""
        started = time.monotonic()
        output = self._output(chunks)
        if self._wrapper.execute_model(output) is None:
            self._wrapper.sample_tokens(None)
        self._finished = set(output.num_scheduled_tokens)
        return time.monotonic() - started

    def _output(self, chunks: Sequence[Chunk]) -> SchedulerOutput:
        lengths = {f"{chunk.order.request_id}@{chunk.start}": chunk.end - chunk.start for chunk in chunks}
        zeroed = [block for chunk in chunks for block in chunk.new_blocks] if self._zeroes else []
        return SchedulerOutput(
            scheduled_new_reqs=[self._request(name, chunk) for name, chunk in zip(lengths, chunks, strict=True)],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens=lengths,
            total_num_scheduled_tokens=sum(lengths.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self._finished,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=zeroed or None,
        )

    def _request(self, name: str, chunk: Chunk) -> NewRequestData:
        token_ids = list(chunk.order.token_ids)
        return NewRequestData(
            req_id=name,
            prompt_token_ids=token_ids,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
            pooling_params=None,
            block_ids=chunk.tables,
            num_computed_tokens=chunk.start,
            lora_request=None,
            prefill_token_ids=token_ids if self._is_v2 else None,
        )


def group_shapes(kv_cache_config: Any) -> tuple[GroupShape, ...]:
    """Return the groups of a KV cache.

    Raises:
        LayoutError: A group is of an unknown kind.
    """
    return tuple(_group_shape(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


def _group_shape(spec: Any) -> GroupShape:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, MambaSpec):
        return GroupShape(spec.block_size, is_state=True)
    if isinstance(spec, SlidingWindowSpec):
        return GroupShape(spec.block_size, window_tokens=spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return GroupShape(spec.block_size, window_tokens=spec.attention_chunk_size)
    if isinstance(spec, FullAttentionSpec):
        return GroupShape(spec.block_size)
    raise LayoutError(f"colocation does not know KV groups of the kind {type(spec).__name__}")
