"""PrfaasConnector: the class that vLLM calls, over a scheduler side and a worker side.

vLLM creates one instance in the scheduler's process and one in each worker's. It calls:

| where | when | method | effect |
|---|---|---|---|
| scheduler | engine start | bind_gpu_block_pool | pins blocks |
| scheduler | engine start | bind_kv_cache_manager | finds the prefix that all groups hold (base class) |
| scheduler | new request | on_new_request | asks the agent: Send or Receive, and Lookup |
| scheduler | before the first run | supports_divergent_local_hybrid_hits | allows attention to reach beyond states |
| scheduler | before the first run | get_num_new_matched_tokens | None until the agent replies, without blocks |
| scheduler | blocks allocated | update_state_after_alloc | names the targets of received blocks; 0 tokens: no load |
| scheduler | blocks run out | has_pending_block_frees | tells of blocks that finished requests will free |
| scheduler | each step | build_connector_meta | names the step's copies; pins blocks of checkpoints |
| scheduler | no request left | has_pending_push_work | asks for steps for checkpoints |
| worker | engine start | register_kv_caches | describes the layout, attaches to the agent |
| worker | each step, before the forward pass | bind_connector_metadata | takes the step's copies |
| worker | each attention layer, if the step saves any | wait_for_layer_load | nothing: requests run once all is loaded |
| worker | each attention layer, if the step saves any | save_kv_layer | copies the layer's new blocks |
| worker | each linear layer with a hook (`hooks.py`) | | copies the final state |
| worker | after the forward pass | start_load_kv | copies received slots into blocks |
| worker | after the forward pass | wait_for_save | copies layers without a hook; ends the pass |
| worker | after the forward pass | get_transfer_results | names the loaded requests |
| worker | after the forward pass | build_connector_worker_meta | names the steps whose saves have ended |
| scheduler | output of a step | update_connector_output | releases slots of loaded requests; wakes parked requests |
| scheduler | end of a request | request_finished_all_groups | completes or cancels; stores its blocks in the pool |
| scheduler | reset of caches | reset_cache | has the agent forget the model; gives up transfers |
| both | engine stop | shutdown | leaves the agent |
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from vllm._custom_ops import swap_blocks_batch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from prfaas import logs
from prfaas.agent.engine.client import AgentClient
from prfaas.connector import settings
from prfaas.connector.metadata import Direction, ScheduledRequest, Step
from prfaas.connector.scheduler.parked import ParkedRequests
from prfaas.connector.scheduler.scheduler import SchedulerSide
from prfaas.connector.scheduler.store import BlockPins
from prfaas.connector.transfer_params import without_direction
from prfaas.connector.vllm import stats
from prfaas.connector.vllm.checks import WITH_KV, check_engine
from prfaas.connector.vllm.hooks import on_layer_end
from prfaas.connector.vllm.kv_layout import (
    Rank,
    block_map,
    check_cache,
    count_equal_ranks,
    describe,
    has_one_attention,
    kv_head_counts,
    packing,
    without_drafts,
)
from prfaas.connector.vllm.request import computed_chain, engine_request
from prfaas.connector.worker.numa import node_of
from prfaas.connector.worker.worker import WorkerSide
from prfaas.transfer_report import SENT_KEY
from prfaas.types import Shard

_log = logs.get("connector")


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Copies of a step, on the way from the scheduler to the workers."""

    step: Step = field(default_factory=Step)


@dataclass
class SavedSteps(KVConnectorWorkerMetadata):
    """Steps whose saves have ended, with the number of workers that say so."""

    num_workers: Counter[int] = field(default_factory=Counter)

    def aggregate(self, report: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(report, SavedSteps)
        return SavedSteps(self.num_workers + report.num_workers)


class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector between this engine and the agent on its machine."""

    _side: SchedulerSide  # Only in the scheduler's instance, of which alone vLLM calls the methods of that side.

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the settings. The scheduler's instance attaches to the agent.

        Raises:
            ConfigError: A setting is wrong, or vLLM has a release or a setting that the connector does not support.
            LayoutError: A KV group is of an unknown kind.
            AgentUnreachable: Nobody answers at `agent_socket`.
        """
        logs.setup("connector", logger="prfaas")
        self._settings = settings.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config, accepts_untested=self._settings.accept_untested_vllm)
        speculation = vllm_config.speculative_config
        self._drafts = speculation.method if speculation and speculation.method in WITH_KV else ""
        if self._drafts and not self._settings.draft_kv:
            self._drafts = ""
            num_layers = vllm_config.model_config.get_total_num_hidden_layers()
            kv_cache_config = without_drafts(kv_cache_config, num_layers)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_cache(kv_cache_config, accepts_untested=self._settings.accept_untested_vllm)
        self._model = self._settings.model or str(vllm_config.model_config.served_model_name)
        self._instance = str(self._kv_transfer_config.engine_id)
        has_priorities = vllm_config.scheduler_config.policy == "priority"
        self._engine_request = partial(engine_request, model=self._model, has_priorities=has_priorities)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._kv_cache_manager: Any = None
        self._block_pool: Any = None
        self._parked = ParkedRequests()
        self._metadata = StepMetadata()
        self._num_preemptions: dict[str, int] = {}  # Preemptions of requests when they were last looked up.
        blocks = block_map(kv_cache_config)
        self._linear_groups = [index for index, group in enumerate(blocks.groups) if group.is_state]
        self._moves_states = speculation is not None and bool(self._linear_groups)
        is_gpu = vllm_config.device_config.device_type == "cuda"
        if role == KVConnectorRole.SCHEDULER:
            self._side = self._scheduler = SchedulerSide(
                AgentClient(str(self._settings.agent_socket), instance=self._instance, role="scheduler"),
                blocks,
                self._settings,
                directions=self._directions(),
                pins=BlockPins(self._pin, self._unpin),
                # With data parallelism of experts, the steps of all ranks wait for this one.
                sleeps_when_idle=vllm_config.parallel_config.data_parallel_size == 1,
                num_workers=vllm_config.parallel_config.tensor_parallel_size if is_gpu else 0,
                has_one_attention=has_one_attention(kv_cache_config),
            )

    def _directions(self) -> Collection[Direction]:
        config = self._kv_transfer_config
        return [*(["send"] if config.is_kv_producer else []), *(["receive"] if config.is_kv_consumer else [])]  # type: ignore[list-item]

    @property
    def requires_kv_delivery(self) -> bool:
        """False: the decode side recomputes a failed transfer, so a preempted prefill need not run again."""
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True if vLLM may count locally cached attention beyond the cached states. vLLM asks before each lookup."""
        return self._scheduler is not None and self._scheduler.allows_divergent_hits

    # Scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._block_pool = gpu_block_pool

    def _pin(self, block_ids: Sequence[int]) -> None:
        self._block_pool.touch([self._block_pool.blocks[block_id] for block_id in block_ids])

    def _unpin(self, block_ids: Sequence[int]) -> None:
        self._block_pool.free_blocks([self._block_pool.blocks[block_id] for block_id in block_ids])

    def on_new_request(self, request: Any) -> None:
        if not isinstance(request.kv_transfer_params, dict):
            request.kv_transfer_params = None  # A client's `vllm_xargs` can put anything there.
        self._side.on_new_request(self._engine_request(request, request.num_prompt_tokens))
        _hide(request, "send")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        _hide(request, "receive")  # Not before: vLLM counts requests that await KV once they are added.
        if self._parked.wake(request):
            self._side.stay_parked(request.request_id)
            num_tokens = None
        else:
            self._look_up_if_preempted(request)
            num_tokens = self._side.num_external_tokens(
                request.request_id,
                num_computed_tokens,
                agreed_tokens=lambda: int(self._kv_cache_manager.get_computed_blocks(request)[1]),
            )
        if num_tokens is None:
            self._parked.park(request)
        return num_tokens, bool(num_tokens)

    def _look_up_if_preempted(self, request: Any) -> None:
        """Look up a preempted request, which begins again with its answer so far as part of the prompt."""
        if request.num_preemptions > self._num_preemptions.get(request.request_id, 0):
            self._num_preemptions[request.request_id] = request.num_preemptions
            self._side.look_up(self._engine_request(request, request.num_tokens))

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Return where the loaded tokens come from: another machine's engine, or this machine's pool."""
        is_received = self._side.load_source(request.request_id) == "receive"
        source = CacheHitSource.P2P if is_received else CacheHitSource.HOST
        return {source: num_external_tokens} if num_external_tokens else {}

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        group_ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return group_ids

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._side.on_allocated(request.request_id, num_external_tokens, lambda: self._tables(blocks.get_block_ids()))

    def has_pending_block_frees(self) -> bool:
        """Return whether finished requests will free blocks, so that vLLM need not preempt a running one."""
        return self._scheduler is not None and self._scheduler.will_free_blocks

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must go on stepping, since blocks are pinned."""
        return self._scheduler is not None and self._scheduler.needs_steps

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        total, prompt_tokens = scheduler_output.total_num_scheduled_tokens, None
        if total:
            # A request that decodes has one token in the step, and its drafts.
            num_drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
            prompt_tokens = total - len(scheduler_output.num_scheduled_tokens) - num_drafts
        step = self._side.plan_step(self._scheduled(scheduler_output), prompt_tokens=prompt_tokens)
        self._parked.mark(self._side.waits)
        if step is not self._metadata.step:
            self._metadata = StepMetadata(step)
        return self._metadata

    def _scheduled(self, output: Any) -> Iterator[ScheduledRequest]:
        cached = output.scheduled_cached_reqs
        new = ((request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs)
        for request_id, computed in chain(new, zip(cached.req_ids, cached.num_computed_tokens, strict=True)):
            after = computed + output.num_scheduled_tokens.get(request_id, 0)
            tables = partial(self._resolved_tables, output, request_id)
            yield ScheduledRequest(request_id, after, tables, computed, self._offered_states(output, request_id))

    def _offered_states(self, output: Any, request_id: str) -> Mapping[int, Mapping[int, int]]:
        """Return blocks with states by boundary and group, for boundaries at which all linear groups cache a state."""
        states: dict[int, dict[int, int]] = {}
        for group_id, block_id, boundary in output.kv_connector_block_state.boundary_state_offloads.get(request_id, ()):
            states.setdefault(boundary, {})[self._kv_cache_config.transfer_group_ids.index(group_id)] = block_id
        return {boundary: blocks for boundary, blocks in states.items() if sorted(blocks) == self._linear_groups}

    def _resolved_tables(self, output: Any, request_id: str) -> Sequence[Sequence[int]]:
        return self._tables(output.kv_connector_block_state.resolve_block_ids(request_id))

    def _tables(self, block_ids: Sequence[list[int]]) -> Sequence[Sequence[int]]:
        tables: Sequence[Sequence[int]] = self._kv_cache_config.select_transfer_block_ids(block_ids)
        return tables

    def update_connector_output(self, connector_output: Any) -> None:
        self._side.prefill_rate.on_step_end(now=time.monotonic())
        finished: Iterable[str] = connector_output.finished_recving or ()
        self._side.on_loaded(finished, failed=connector_output.failed_recving or ())
        self._side.on_stored(connector_output.finished_sending or ())
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, SavedSteps):
            self._side.on_saved(report.num_workers)
        if self._parked:
            self._side.poll()
            self._parked.unmark(self._side.waits)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        _hide(request, "receive")
        self._parked.forget(request.request_id)
        self._num_preemptions.pop(request.request_id, None)
        salt, moves_states = self._settings.tenant, self._moves_states
        leaves = partial(computed_chain, request, self._model, default_tenant=salt, moves_states=moves_states)
        keeps_blocks, params = self._side.on_finished(request.request_id, leaves, lambda: self._tables(block_ids))
        if params and params.get(SENT_KEY) == "completed":
            # vLLM adds the number of tokens that the prefill engine had cached to such an answer.
            params["do_remote_prefill"] = True
        return keeps_blocks, params

    def reset_cache(self) -> bool | None:
        """Return whether this machine's agent has forgotten all KV of the model, since its weights may be new."""
        return self._scheduler.reset(self._model) if self._scheduler is not None else None

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe this rank's layout and attach to the agent.

        Raises:
            LayoutError: The layout is not supported, or the agent knows this model with another layout.
            AgentUnreachable: Nobody answers at `agent_socket`.
        """
        modules = self._vllm_config.compilation_config.static_forward_context
        device = next(iter(kv_caches.values())).device
        cache_dtype = self._vllm_config.cache_config.cache_dtype
        names = [name for group in self._kv_cache_config.kv_cache_groups for name in group.layer_names]
        is_assumed = self._settings.assume_plain_attention
        kernels = packing(modules, names, cache_dtype=cache_dtype, device=device, assumes_plain=is_assumed)
        kernels += f"; drafts={self._drafts}" if self._drafts else ""
        size = self._vllm_config.parallel_config.tensor_parallel_size
        tensor_rank = get_tensor_model_parallel_rank() if size > 1 else 0
        counts = self._kv_head_counts()
        equal = count_equal_ranks(self._kv_cache_config, num_ranks=size, kv_head_counts=counts)
        copies = equal.in_all_layers
        rank = Rank(self._model, Shard(tensor_rank // copies, size // copies), counts, equal.in_attention // copies)
        layout, layers = describe(self._kv_cache_config, kv_caches, rank, packing=kernels)
        replica = tensor_rank % copies
        client = AgentClient(
            str(self._settings.agent_socket),
            instance=self._instance,
            role="worker",
            rank=layout.shard.rank,
            layout=layout,
            pins_arena=device.type == "cuda",
            replica=replica,
            num_replicas=copies,
            node=node_of(device),
        )
        is_layerwise = self._settings.layerwise != "off"
        self._worker = WorkerSide(
            client,
            layers,
            layout,
            copy_batch=swap_blocks_batch,
            is_writer=replica == 0,
            is_layerwise=is_layerwise,
            staging_bytes=self._settings.staging_bytes,
        )
        is_compiled = not self._vllm_config.model_config.enforce_eager
        for name in self._worker.linear_layers if is_layerwise else ():
            on_layer_end(modules[name], partial(self._worker.on_layer_end, name), is_compiled=is_compiled)
        _log.info("engine.attached", agent=client.attached.agent, layout=layout.to_dict())

    def _kv_head_counts(self) -> set[int]:
        """Return all numbers of KV heads that layers have, those of drafts among them."""
        speculation = self._vllm_config.speculative_config
        draft = speculation.draft_model_config if speculation and self._drafts else None
        models = (self._vllm_config.model_config, draft)
        return set().union(*(kv_head_counts(model) for model in models if model is not None))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step. The base class gets metadata only if a layer is copied at its end: then vLLM reports layers."""
        assert isinstance(connector_metadata, StepMetadata)
        if self._worker is not None:
            self._worker.begin_step(connector_metadata.step)
            if self._worker.awaits_layers:
                super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.on_layer_end(layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.on_forward_end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.take_results()
        return KVConnectorTransferResults(
            finished_sending=set(results.stored),
            finished_recving=set(results.loaded),
            failed_recving=set(results.failed),
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        numbers = self._worker.take_saved_steps() if self._worker is not None else []
        return SavedSteps(Counter(numbers)) if numbers else None

    # Both sides

    def get_kv_connector_stats(self) -> Any:
        side = self._scheduler or self._worker
        return stats.from_counts(side.counts) if side is not None else None

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        self._scheduler = self._worker = None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether vLLM must leave out full CUDA graphs, which replay without `save_kv_layer`.

        A step that reports no layers is copied at its end, so only an operator who insists on layers needs this.
        """
        return extra_config.get("layerwise") == "on"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return stats.PrfaasStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> Any:
        return stats.PrfaasPromMetrics(*arguments, **named)


def _hide(request: Any, direction: Direction) -> None:
    """Keep the direction of a transfer from other connectors, which would take the transfer for theirs."""
    if request.kv_transfer_params is not None:
        # Requests with n > 1 may share the dictionary, so it is replaced.
        request.kv_transfer_params = without_direction(request.kv_transfer_params, direction)
