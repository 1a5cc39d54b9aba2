"""Engine with vLLM's own scheduler, block manager and connector path of Model Runner V2, but without a model.

All calls of the connector are vLLM's code, except those at the end of layers. Blocks hold bytes that say what they are, as
in the fake engine of the integration tests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from prfaas.connector.block_map import NULL_BLOCK
from prfaas.connector.vllm.connector import PrfaasConnector
from prfaas.connector.vllm.kv_layout import Rank, block_map, describe
from prfaas.connector.worker.copy_host import LayerBlocks
from prfaas.kv.group import KVGroup
from prfaas.types import Shard
from tests.support.fake_engine import changed_blocks, content, read_blocks
from tests.support.waiting import wait_until

BLOCK_TOKENS = 32
NUM_HEADS = 2  # Of the model whose configuration vLLM reads.
ANSWER_TOKEN = 7
WRONG_TOKEN = 9  # Of a draft.
NO_DRAFT = -1  # vLLM schedules so many places for drafts with the last token of a prompt whose KV was loaded.
END_TOKEN = 8  # Ends an answer before its limit.


class SilentBackend:
    """Stands where vLLM keeps a layer's attention backend."""

    @staticmethod
    def get_name() -> str:
        return "SILENT"


class SilentLayer(torch.nn.Identity):  # type: ignore[misc]
    """Stands where vLLM keeps a layer's module, for the hooks of those whose end it does not report."""

    def get_attn_backend(self) -> type[SilentBackend]:
        return SilentBackend


@dataclass
class StatePlace:
    """Place of a request's running state: `num_accepted` - 1 entries behind `entry` of the block table."""

    entry: int
    num_accepted: int = 1


@dataclass
class Observations:
    """Observations of an engine's clients, and of its blocks.

    Attributes:
        finished: Reasons of ends by request.
        resumed_at: Tokens that a request did not compute.
        resumed_again_at: The same after a preemption.
        wrong_blocks: Blocks that were read with wrong bytes.
        outcomes: Transfers in vLLM's statistics.
        copied_bytes: Bytes copied from blocks (send) and to blocks (receive) in vLLM's statistics.
        loaded_tokens: Tokens that vLLM counts as loaded, by source.
        answers: `kv_transfer_params` of ended requests.
    """

    finished: dict[str, str] = field(default_factory=dict)
    resumed_at: dict[str, int] = field(default_factory=dict)
    resumed_again_at: dict[str, int] = field(default_factory=dict)
    wrong_blocks: list[tuple[str, int, str, int]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    copied_bytes: Counter[str] = field(default_factory=Counter)
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    answers: dict[str, dict[str, Any] | None] = field(default_factory=dict)


class ScheduledEngine:
    """One engine of one rank. Nothing runs by itself: tests call `step`."""

    def __init__(
        self,
        model: Path,
        agent_socket: Path,
        kv: KVCacheConfig,
        caches: dict[str, torch.Tensor],
        *,
        name: str,
        identity: str,
        role: str,
        load_failure: str = "recompute",
        chunk_tokens: int = 64,
        caches_prefixes: bool = False,
        policy: Literal["fcfs", "priority"] = "fcfs",
        asynchronous: bool = False,
        data_parallel_size: int = 1,
        device_type: str = "cpu",
        num_drafts: int = 0,
        eagle: Path | None = None,
        **settings: Any,
    ) -> None:
        """`asynchronous`: each step is scheduled before the scheduler hears of the one before, as on GPUs.

        With `num_drafts` each step drafts so many tokens by n-grams, or by the model `eagle`. The last of them is wrong.
        With the `device_type` "cuda" blocks stay allocated until workers report the end of their copies.
        With a `data_parallel_size` it is the first of so many ranks of experts, as its configuration says.
        """
        patient = {"silence_seconds": "20s"}  # The agent of a busy machine is slow.
        transfer = KVTransferConfig(
            kv_connector="PrfaasConnector",
            kv_connector_module_path="prfaas.connector.vllm.connector",
            kv_role=role,
            engine_id=name,
            kv_load_failure_policy=load_failure,
            kv_connector_extra_config={
                "agent_socket": str(agent_socket),
                "reuse": False,
                "model": identity,
                **patient,
                **settings,
            },
        )
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            block_size=BLOCK_TOKENS,
            max_num_seqs=8,
            max_num_batched_tokens=chunk_tokens,
            enable_prefix_caching=caches_prefixes,
            scheduling_policy=policy,
            skip_tokenizer_init=True,
            speculative_config=_speculation(num_drafts, eagle) if num_drafts else None,
            kv_transfer_config=transfer,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = kv.num_blocks
        if any(group.kept_states for group in block_map(kv).groups):
            config.cache_config.mamba_cache_mode = "align"
        modules = {name: SilentLayer() for name in caches}
        config.compilation_config.static_forward_context.update(modules)
        config.scheduler_config.async_scheduling = asynchronous
        config.parallel_config.data_parallel_size = data_parallel_size
        config.device_config.device_type = device_type
        self.told = Observations()
        self._num_drafts = num_drafts
        self._moves_states = num_drafts > 0
        self._states: dict[str, StatePlace] = {}
        self._held_copies: list[Callable[[], None]] = []
        self._asynchronous = asynchronous
        self._in_flight: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
        self._lengths: dict[str, int] = {}  # Of answers that end by themselves, with their last token.
        self._num_sampled: Counter[str] = Counter()
        self._modules = modules
        self._kv = kv
        self._groups: tuple[KVGroup, ...] = block_map(kv).groups
        self._keeps_states = any(group.kept_states for group in self._groups)
        self._layers: dict[str, LayerBlocks] = describe(kv, caches, Rank("", Shard(), {NUM_HEADS}), packing="")[1]
        self._requests: dict[str, Request] = {}
        align, hashed = resolve_kv_cache_block_sizes(kv, config)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(hashed, hash_function)
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            config, kv, StructuredOutputManager(config), block_size=align, hash_block_size=hashed, log_stats=True
        )
        self.worker = PrfaasConnector(config, KVConnectorRole.WORKER, kv)
        with self._as_transfer_group():
            self._runner = ActiveKVConnector(config, caches)

    @contextlib.contextmanager
    def _as_transfer_group(self) -> Iterator[None]:
        """Make this engine's worker the connector of the process, of which vLLM has one."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.worker)
            yield

    def close(self) -> None:
        self.scheduler.connector.shutdown()
        self.worker.shutdown()

    @property
    def num_blocks(self) -> int:
        return int(self._kv.num_blocks)

    @property
    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def has_work(self) -> bool:
        """True if vLLM goes on stepping."""
        return bool(self.scheduler.has_requests())

    def leftovers(self) -> list[Any]:
        """Return all that vLLM and the connector keep of requests. Ended requests must leave nothing."""
        connector = self.scheduler.connector
        side, worker = connector._scheduler, self.worker._worker
        kept = [
            self.scheduler.requests,
            connector._parked._parked,
            connector._parked._marked,
            connector._num_preemptions,
        ]
        kept += [side._lookups.asked_again, side._outbound.outcomes, side._outbound]
        kept += [side._inbound, side._lookups, side._stores._prompts]
        kept += [side._has_work, side.will_free_blocks, worker._pending, worker._backlog]  # type: ignore[union-attr]
        return [item for item in kept if item]

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        parameters: Any,
        *,
        answer_tokens: int,
        priority: int = 0,
        ends_by_itself: bool = False,
        prompt_logprobs: int | None = None,
    ) -> None:
        """An answer of so many tokens; it has reached its limit then unless it `ends_by_itself`."""
        sampling = SamplingParams(
            temperature=0,
            max_tokens=answer_tokens + ends_by_itself * BLOCK_TOKENS,
            ignore_eos=True,
            stop_token_ids=[END_TOKEN],
            prompt_logprobs=prompt_logprobs,
            extra_args={"kv_transfer_params": parameters},
        )
        if ends_by_itself:
            self._lengths[request_id] = answer_tokens
        request = Request(request_id, list(prompt), sampling, None, block_hasher=self._block_hasher, priority=priority)
        self._requests[request_id] = request
        self.scheduler.add_request(request)

    def send(self, prompt: Sequence[int], grant: str, *, priority: int = 0) -> str:
        """Submit a prefill leg and return its id."""
        request_id = f"p{prompt[0]}"
        parameters = {"do_remote_decode": True, "prfaas_grant": grant}
        self.submit(request_id, prompt[:-1], parameters, answer_tokens=1, priority=priority)
        return request_id

    def receive(
        self, prompt: Sequence[int], grant: str, *, answer_tokens: int = 3, sample: str = "", priority: int = 0
    ) -> str:
        """Submit a decode leg and return its id."""
        request_id = f"{sample}d{prompt[0]}"
        parameters = {"do_remote_prefill": True, "prfaas_grant": grant}
        self.submit(request_id, prompt, parameters, answer_tokens=answer_tokens, priority=priority)
        return request_id

    def status(self, request_id: str) -> RequestStatus:
        return self._requests[request_id].status

    def holds_blocks(self, request_id: str) -> bool:
        return any(self.scheduler.kv_cache_manager.get_block_ids(request_id))

    def num_hashed_blocks(self, request_id: str) -> int:
        """Return how many of a request's blocks are in vLLM's prefix cache."""
        manager = self.scheduler.kv_cache_manager
        (table,) = manager.get_block_ids(request_id)
        return sum(manager.block_pool.blocks[block].block_hash is not None for block in table)

    def await_offer(self, request_id: str) -> None:
        """Wait until the KV for a request can be loaded."""
        side = self.scheduler.connector._scheduler
        wait_until(lambda: side.num_external_tokens(request_id, 0), what="the KV")

    def refuse(self, request_id: str, parameters: dict[str, Any]) -> None:
        """Do what vLLM's API and engine core do with a decode leg that the API refuses."""
        told: list[EngineCoreRequest] = []

        async def add(request: EngineCoreRequest) -> None:
            told.append(request)

        api = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=add))
        asyncio.run(AsyncLLM.notify_kv_transfer_request_rejected(api, request_id, parameters))
        request = Request.from_engine_core_request(told[0], self._block_hasher)
        self.scheduler.add_request(request)
        assert request.abort_immediately
        self.abort(request_id)

    def end_answer(self, request_id: str) -> None:
        """The request's next token is its last."""
        self._lengths[request_id] = self._num_sampled[request_id] + 1

    def num_computed_tokens(self, request_id: str) -> int:
        return int(self._requests[request_id].num_computed_tokens)

    def parameters(self, request_id: str) -> Any:
        """`kv_transfer_params` as every other connector reads them."""
        return self._requests[request_id].kv_transfer_params

    def num_preemptions(self, request_id: str) -> int:
        return int(self._requests[request_id].num_preemptions)

    def num_awaiting_kv(self, stage: str) -> int:
        """Return how many requests vLLM counts in a stage of waiting for KV."""
        stats = self.scheduler.make_stats()
        assert stats is not None
        return int(stats.num_kv_fetch_reqs_by_stage[stage])

    @contextlib.contextmanager
    def copies_held(self) -> Iterator[None]:
        """Hold the ends of all saves back, as a GPU that has not made them yet."""
        copier = self.worker._worker._copier  # type: ignore[union-attr]
        held, save = self._held_copies, copier.save
        copier.save = lambda copies, done: held.append(partial(save, copies, done))  # type: ignore[method-assign]
        yield
        copier.save = save  # type: ignore[method-assign]
        while held:
            held.pop(0)()

    @property
    def num_awaiting_copies(self) -> int:
        return len(self._held_copies)

    def preempt_all(self) -> None:
        """Have vLLM take the blocks of all running requests. It complains afterwards where others wait that have blocks."""
        with contextlib.suppress(RuntimeError):
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def evict_states(self) -> None:
        """Have vLLM's own prefix cache lose all states, and keep all attention."""
        pool = self.scheduler.kv_cache_manager.block_pool
        linear = {index for index, group in enumerate(self._groups) if group.is_state}
        cached = [block for block in pool.blocks if block.block_hash is not None]
        states = {block.block_id for block in cached if get_group_id(block.block_hash) in linear}
        assert states, "vLLM's cache holds no state"
        pool.evict_blocks(states)

    def spoil_pool(self) -> None:
        """Overwrite every slot of the pool that this engine loads from."""
        client = self.worker._worker._client  # type: ignore[union-attr]
        start, arena = client.attached.header_bytes, client.arena
        arena[start:] = bytes(len(arena) - start)

    def reuse_slot(self, request_id: str) -> None:
        """Make a slot that holds KV for a request look as if it was given to another block."""
        side = self.scheduler.connector._scheduler
        wait_until(lambda: side.poll() >= 0 and not side.waits(request_id), what="the transfer")
        slot = side._inbound.of_request(request_id).ready.slots[0][0][0]
        self.worker._worker._generations[0][slot] += 1  # type: ignore[union-attr]

    def is_looked_up(self, request_id: str) -> bool:
        """Return whether vLLM looks up the request's prefix next time."""
        return not self._requests[request_id].skip_reading_prefix_cache

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> int:
        """One engine step; how many tokens it has computed."""
        output = self.scheduler.schedule()
        assert not output.has_sync_kv_loads
        with self._as_transfer_group():
            transferred = self._execute(output)
        assert transferred is not None and not transferred.invalid_block_ids
        assert not self.worker.has_connector_metadata()
        done: tuple[SchedulerOutput, ModelRunnerOutput] | None = (output, self._sampled(output, transferred))
        if self._asynchronous:
            done, self._in_flight = self._in_flight, done
        if done is not None:
            for core in self.scheduler.update_from_output(*done).values():
                self._take(core)
            if self._num_drafts:
                self.scheduler.update_draft_token_ids(self._next_drafts)
        return int(output.total_num_scheduled_tokens)

    def _execute(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """Call the connector as vLLM's Model Runner V2 does."""
        if not output.total_num_scheduled_tokens:
            return self._runner.no_forward(output).kv_connector_output or KVConnectorOutput()
        self._runner.pre_forward(output)
        self._run_model(output)
        self._runner.finish_forward()
        return self._runner.post_forward(output.finished_req_ids)

    def _take(self, core: EngineCoreOutputs) -> None:
        for output in core.outputs:
            if output.finish_reason is not None:
                self.told.finished[output.request_id] = str(output.finish_reason)
                self.told.answers[output.request_id] = output.kv_transfer_params
        stats = core.scheduler_stats and core.scheduler_stats.connector_prefix_cache_stats
        if stats:
            self.told.loaded_tokens.update({source.value: n for source, n in stats.hits_by_source.items()})
        counts = (core.scheduler_stats and core.scheduler_stats.kv_connector_stats) or {}
        for name, count in counts.items():
            kind, _, labels = name.partition(" ")
            if kind == "transfers":
                self.told.outcomes[labels] += count
            elif kind == "bytes":
                self.told.copied_bytes[labels] += count

    def _run_model(self, output: SchedulerOutput) -> None:
        """Each layer in turn: read what came before, write this step's tokens, say so as vLLM does."""
        work = [(req.req_id, req.num_computed_tokens) for req in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        self._begun = {req.req_id for req in output.scheduled_new_reqs} | cached.resumed_req_ids
        drafts = output.scheduled_spec_decode_tokens
        self._num_scheduled_drafts = {request_id: len(tokens) for request_id, tokens in drafts.items()}
        work += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id, before in work:
            if request_id not in self.told.resumed_at:
                self.told.resumed_at[request_id] = before
            elif request_id in cached.resumed_req_ids:
                self.told.resumed_again_at[request_id] = before
        num_tokens = output.num_scheduled_tokens
        # Blocks of attention hold nothing of use where a draft is wrong.
        steps = [
            (request_id, at, at + num_tokens[request_id] - self._num_rejected(output, request_id))
            for request_id, at in work
        ]
        ends = {request_id: at + num_tokens[request_id] for request_id, at in work}
        self._begin_states(steps, ends)
        for name, layer in self._layers.items():
            is_linear = self._groups[layer.group].is_state
            is_reported = not is_linear and self.worker.has_connector_metadata()
            if is_reported:
                self.worker.wait_for_layer_load(name)
            if is_linear and self._moves_states:
                self._compute_states(name, layer, steps, ends)
            else:
                self._compute(name, layer, steps)
            if is_linear:
                self._modules[name](torch.zeros(1))
            elif is_reported:
                self.worker.save_kv_layer(name, layer.pages, None)
        self._end_states(steps, ends)

    def _begin_states(self, steps: Sequence[tuple[str, int, int]], ends: dict[str, int]) -> None:
        """Move running states to the blocks of this step's last tokens, as vLLM does if it keeps states at boundaries."""
        for request_id, before, _ in steps if self._moves_states else ():
            place = self._states.get(request_id)
            if place is None or request_id in self._begun:
                place = self._states[request_id] = StatePlace(self._entry(before))
            if before and place.entry != self._entry(ends[request_id]):
                self._copy_states(request_id, place.entry + place.num_accepted - 1, self._entry(ends[request_id]))
                place.num_accepted = 1
            place.entry = self._entry(ends[request_id])

    def _end_states(self, steps: Sequence[tuple[str, int, int]], ends: dict[str, int]) -> None:
        """Note how many drafts were accepted, and copy the state of a boundary that they passed to its block."""
        for request_id, _, after in steps if self._moves_states else ():
            place, num_drafts = self._states[request_id], self._num_scheduled_drafts.get(request_id, 0)
            running = ends[request_id] - num_drafts
            place.num_accepted = after - running + 1
            boundary = after // BLOCK_TOKENS * BLOCK_TOKENS
            if self._keeps_states and boundary >= running:
                self._copy_states(request_id, place.entry + boundary - running, self._entry(boundary))
                if place.entry == self._entry(boundary):
                    place.num_accepted = 1

    def _entry(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // BLOCK_TOKENS if self._keeps_states else 0

    def _copy_states(self, request_id: str, source: int, target: int) -> None:
        for layer in self._layers.values():
            if self._groups[layer.group].is_state and source != target:
                table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[layer.group]
                layer.pages[table[target]] = layer.pages[table[source]]

    def _compute_states(
        self, name: str, layer: LayerBlocks, steps: Sequence[tuple[str, int, int]], ends: dict[str, int]
    ) -> None:
        """Write the state after each draft to a block of its own, behind that of the state without drafts."""
        for request_id, before, _ in steps:
            place, request = self._states[request_id], self._requests[request_id]
            table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[layer.group]
            start = layer.pages[table[place.entry + place.num_accepted - 1]]
            if before and not torch.equal(start, self._content(request, layer, before)):
                self.told.wrong_blocks.append((request_id, before, name, place.entry))
            running = ends[request_id] - self._num_scheduled_drafts.get(request_id, 0)
            for number, length in enumerate(range(running, ends[request_id] + 1)):
                layer.pages[table[place.entry + number]] = self._content(request, layer, length)

    def _compute(self, name: str, layer: LayerBlocks, work: Sequence[tuple[str, int, int]]) -> None:
        """`work`: each request, and from where to where it computes. One may attend to blocks that another of the same step
        fills: a layer writes the keys and values of all of them before that. States it reads before it writes any."""
        is_linear = self._groups[layer.group].is_state
        wrong = [
            (request_id, before, position)
            for request_id, before, _ in work
            for position in self._wrong(layer, request_id, before)
        ]
        for request_id, before, after in work:
            for position, end in changed_blocks(self._groups[layer.group], before, after):
                if (page := self._page(layer, request_id, position)) is not None:
                    page[:] = self._content(self._requests[request_id], layer, end)
        for request_id, before, position in wrong:
            if is_linear or position in self._wrong(layer, request_id, before):
                self.told.wrong_blocks.append((request_id, before, name, position))

    def _wrong(self, layer: LayerBlocks, request_id: str, num_tokens: int) -> list[int]:
        """The positions of what the token after `num_tokens` reads that do not hold what they must."""
        found = []
        for position, end in read_blocks(self._groups[layer.group], num_tokens):
            page = self._page(layer, request_id, position)
            if page is None or not torch.equal(page, self._content(self._requests[request_id], layer, end)):
                found.append(position)
        return found

    def _page(self, layer: LayerBlocks, request_id: str, position: int) -> torch.Tensor | None:
        """The block that a request has there, if it has one."""
        block = self.scheduler.kv_cache_manager.get_block_ids(request_id)[layer.group][position]
        return None if block == NULL_BLOCK else layer.pages[block]

    def _content(self, request: Request, layer: LayerBlocks, num_tokens: int) -> torch.Tensor:
        """Return the bytes of a layer's block after so many tokens. vLLM may not know the last token yet."""
        prompt = request.prompt_token_ids
        assert prompt is not None
        answer = [self._answer_token(request, number) for number in range(1, num_tokens - len(prompt) + 1)]
        return content([*prompt[:num_tokens], *answer], (layer.group, layer.layer), layer.pages.shape[1])

    def _sampled(self, output: SchedulerOutput, transferred: KVConnectorOutput) -> ModelRunnerOutput:
        """A token for each request whose prompt is computed."""
        ids = list(output.num_scheduled_tokens)
        requests = (self._requests[request_id] for request_id in ids)
        sampled = [
            [self._next_token(request) for _ in range(self._num_sampled_now(output, request))]
            if request.num_computed_tokens >= request.num_tokens
            else []
            for request in requests
        ]
        if self._num_drafts:
            self._next_drafts = DraftTokenIds(ids, [self._drafts(self._requests[request_id]) for request_id in ids])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=transferred,
        )

    def _num_rejected(self, output: SchedulerOutput, request_id: str) -> int:
        """Return how many drafts of a step are wrong: all from the first wrong one, or place that vLLM keeps for a draft."""
        drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
        return len(drafts) - sum(1 for _ in takewhile(lambda token: token not in (WRONG_TOKEN, NO_DRAFT), drafts))

    def _num_sampled_now(self, output: SchedulerOutput, request: Request) -> int:
        drafts = output.scheduled_spec_decode_tokens.get(request.request_id, [])
        return 1 + len(drafts) - self._num_rejected(output, request.request_id)

    def _drafts(self, request: Request) -> list[int]:
        """Return the next tokens of an answer, and a wrong one behind them."""
        number = self._num_sampled[request.request_id]
        right = [self._answer_token(request, number + ahead) for ahead in range(1, self._num_drafts)]
        return [*right, WRONG_TOKEN] if number else []

    def _next_token(self, request: Request) -> int:
        self._num_sampled[request.request_id] += 1
        return self._answer_token(request, self._num_sampled[request.request_id])

    def _answer_token(self, request: Request, number: int) -> int:
        """Return a token of an answer, counted from 1."""
        return END_TOKEN if number == self._lengths.get(request.request_id) else ANSWER_TOKEN


def _speculation(num_drafts: int, eagle: Path | None) -> dict[str, Any]:
    if eagle is not None:
        return {"method": "eagle", "model": str(eagle), "num_speculative_tokens": num_drafts}
    return {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
