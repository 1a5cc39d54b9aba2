"""`PrfaasConnector`: vLLM's KV connector interface (v1, with hybrid groups), delegating to its two halves.

| method | process | when |
|---|---|---|
| `__init__` (SCHEDULER) | engine core | engine start: attaches to the agent |
| `on_new_request` | engine core | a request arrives: posts Send or Receive |
| `get_num_new_matched_tokens` | engine core | each time the request might be scheduled: `None` is "not yet" |
| `update_state_after_alloc` | engine core | its blocks are allocated: plans the load |
| `build_connector_meta` | engine core | each step: which blocks to save, which to load |
| `update_connector_output` | engine core | after a step: loads that have ended |
| `request_finished_all_groups` | engine core | a request ends, however it ends |
| `register_kv_caches` | worker | engine start: describes the layout, attaches, maps the arena |
| `start_load_kv` | worker | each step: slots to blocks |
| `save_kv_layer` | worker | each attention layer of a step: blocks to slots, ring |
| `wait_for_save` | worker | the forward pass has ended: layers without a hook |
| `get_transfer_results` | worker | end of a step |

The engine is named by vLLM's `engine_id`. Both halves live in each process that has them; the scheduler half has no
tensors, the worker half knows no requests beyond their ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.kv_cache_interface import MambaSpec

from prfaas import grants, logs
from prfaas.agent.client import AgentClient
from prfaas.connector.config import parse_extra_config
from prfaas.connector.engine_layout import (
    block_rows,
    group_shapes,
    layer_groups,
    make_layout,
    refuse_unsupported,
)
from prfaas.connector.request_hash import request_chain
from prfaas.connector.scheduler_side import SchedulerSide
from prfaas.connector.step_work import StepWork
from prfaas.connector.worker_side import WorkerSide
from prfaas.errors import GrantError
from prfaas.types import Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

GRANT_PARAM = "prfaas_grant"
_log = logs.get("connector")


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's work, as vLLM carries it from scheduler to workers."""

    work: StepWork = field(default_factory=StepWork)


class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):
    """KV of long prompts from another cluster, through the agent on this machine."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported(vllm_config)
        transfer = self._kv_transfer_config
        self._config = parse_extra_config(
            transfer.kv_connector_extra_config, served_model=_served_name(vllm_config.model_config)
        )
        self._instance = str(transfer.engine_id)
        self._shapes = group_shapes(kv_cache_config)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            client = AgentClient(self._config.agent_socket, instance=self._instance, role="scheduler")
            self._scheduler = SchedulerSide(
                client, self._config, self._shapes, state_position=_states_have_positions(kv_cache_config)
            )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # a full graph would skip the layer hooks

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a hand-off that fails is recomputed by the decode side

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()
        self._scheduler = self._worker = None

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        places = layer_groups(self._kv_cache_config)
        num_blocks = self._kv_cache_config.num_blocks
        rows = {name: block_rows(name, kv_caches[name], num_blocks=num_blocks) for name in places}
        layout = make_layout(
            self._kv_cache_config,
            rows,
            model=self._config.model,
            shard=Shard(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()),
            dtypes={name: str(kv_caches[name].dtype).removeprefix("torch.") for name in places},
        )
        client = AgentClient(
            self._config.agent_socket, instance=self._instance, role="worker", rank=layout.shard.rank, layout=layout
        )
        self._worker = WorkerSide(client, layout, rows, places)

    def _step(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.work

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(self._step())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._step().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before their request is scheduled, so no layer waits."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None and self.has_connector_metadata():
            self._worker.save_layer(self._step(), layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_step(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        loaded, failed = self._worker.take_results(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    # Scheduler

    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler method was called on a worker"
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params or {}
        token = params.get(GRANT_PARAM)
        if not isinstance(token, str):
            return
        try:
            signed = grants.from_text(token)
            transfer_id = grants.transfer_id_of(signed)
        except GrantError as error:
            _log.warning("grant.malformed", request=request.request_id, message=str(error))
            return
        sends = bool(params.get("do_remote_decode"))
        num_tokens = request.num_prompt_tokens - (0 if sends else 1)
        chain = request_chain(request, num_tokens, model=self._config.model, tenant=self._config.tenant)
        if chain is None or num_tokens <= 0:
            _log.info("request.unhashable", request=request.request_id)
            return
        begin = self._side().send if sends else self._side().receive
        begin(request.request_id, chain, transfer_id, signed)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_external = self._side().num_external_tokens(request.request_id, num_computed_tokens)
        return num_external, bool(num_external)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._side().load(request.request_id, self._transferable(blocks.get_block_ids()))

    def _transferable(self, block_ids: tuple[list[int], ...]) -> tuple[list[int], ...]:
        return self._kv_cache_config.select_transfer_block_ids(block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        side = self._side()
        side.idle = scheduler_output.total_num_scheduled_tokens == 0
        work = StepWork(loads=side.plan_loads())
        if any(True for _ in side.sending()):
            self._plan_saves(scheduler_output, work)
        return StepMetadata(work)

    def _plan_saves(self, output: SchedulerOutput, work: StepWork) -> None:
        state = output.kv_connector_block_state
        assert state is not None, "vLLM offers the block state inside build_connector_meta"
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in list(self._side().sending()):
            block_ids = state.get_block_ids(request_id)
            if block_ids is None or request_id not in computed:
                continue
            after = computed[request_id] + output.num_scheduled_tokens[request_id]
            save = self._side().plan_save(request_id, self._transferable(block_ids), after)
            if save is not None:
                work.saves.append(save)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        loaded = connector_output.finished_recving or set()
        self._side().loaded(loaded, connector_output.failed_recving or set())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._side().forget(request.request_id)
        return False, None  # slots hold copies, so the blocks may go


def _served_name(model_config: Any) -> str:
    name = model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name or model_config.model)


def _states_have_positions(config: KVCacheConfig) -> bool:
    """Whether vLLM keeps checkpoints of recurrent states, so that the running one stands at its token's place."""
    specs = [group.kv_cache_spec for group in config.transfer_groups]
    return any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "none" for spec in specs)
