"""Connector of the decode engine: hands prompts to the prefill worker of the same device.

To vLLM the prefill worker is a source of KV. The connector offers all tokens of a prompt but the last. vLLM allocates their
blocks and parks the request. The prefill worker computes into these blocks, and the request goes on. Beside an agent,
`PrfaasConnector` comes first: the prefill worker computes what it does not load.
"""

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from prfaas import logs
from prfaas.colocate.cores import Cores, all_cores, move_threads, resize_team
from prfaas.colocate.messages import PrefillHello
from prfaas.colocate.partition import PartitionManager, PartitionSettings
from prfaas.colocate.prefill_client import PrefillClient
from prfaas.colocate.prefill_plan import GroupShape, Order, has_context, num_scratch_blocks
from prfaas.colocate.prefill_worker import group_shapes
from prfaas.colocate.settings import read
from prfaas.connector.vllm.connector import PrfaasConnector, StepMetadata
from prfaas.errors import ConfigError
from prfaas.scheduler.colocation import StepLoad

MIN_PREFILL_TOKENS = 16  # Fewer tokens cost a decode step less than the hand-over costs the request.
IDLE_WAIT_SECONDS = 0.02  # An idle decode engine waits for the prefill worker; it notices no new request meanwhile.


@dataclass
class ColocatedStep(KVConnectorMetadata):
    """Cores of the decode worker, prompts that the prefill worker will not compute, and copies of the agent's connector."""

    cores: Cores = ()
    refused: frozenset[str] = frozenset()
    agent_step: KVConnectorMetadata = field(default_factory=StepMetadata)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Report of the decode worker. It is sent after each step, so that vLLM asks the connector for finished prompts."""

    of_agent: KVConnectorWorkerMetadata | None = None

    def aggregate(self, report: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


@dataclass(frozen=True)
class Offer:
    """Tokens that the connector has offered: those that the agent loads, from `start` on, and then the prefill worker's."""

    start: int
    num_loaded: int
    end: int


class ColocateConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector between decode engine, prefill worker and, if configured, the machine's agent."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the settings.

        Raises:
            ConfigError: A setting is wrong, or vLLM has a setting that colocation does not support.
            LayoutError: A KV group is of an unknown kind.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        logs.setup("colocate", logger="prfaas")
        _check_supported(vllm_config)
        partition, of_agent = read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._agent = _agent_connector(vllm_config, role, kv_cache_config, of_agent) if of_agent else None
        self._offers: dict[str, Offer] = {}
        self._loads: dict[str, tuple[Offer, Any, tuple[tuple[int, ...], ...]]] = {}
        self._refused: set[str] = set()  # Prompts that are left to the decode engine.
        self._newly_refused: frozenset[str] = frozenset()  # In this step of the worker.
        self._prefill: PrefillClient
        self._manager: PartitionManager
        self._groups: tuple[GroupShape, ...]
        self._cores: Cores = ()
        self._all_cores = all_cores()
        self._steps: deque[float] = deque(maxlen=16)  # Seconds of the last decode steps.
        self._step_started = self._step_ended = 0.0
        self._was_paced = False
        self._partition_settings: PartitionSettings = partition

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a preempted prompt is computed again."""
        return False

    # Scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take scratch blocks out of the pool, and start the prefill worker."""
        if self._agent is not None:
            self._agent.bind_gpu_block_pool(gpu_block_pool)
        config = self._vllm_config
        chunk_tokens = config.scheduler_config.max_num_batched_tokens
        self._groups = group_shapes(self._kv_cache_config)
        num_scratch = num_scratch_blocks(self._groups, chunk_tokens)
        if 2 * num_scratch > gpu_block_pool.num_gpu_blocks:
            raise ConfigError(
                f"{gpu_block_pool.num_gpu_blocks} KV blocks: the prefill worker alone needs {num_scratch}"
            )
        scratch = tuple(block.block_id for block in gpu_block_pool.get_new_blocks(num_scratch))
        gpu_block_pool.num_gpu_blocks -= num_scratch
        self._manager = PartitionManager(self._partition_settings, self._all_cores)
        self._prefill = PrefillClient(PrefillHello(self._kv_cache_config, config.model_config.max_model_len, scratch))

    def pin(self, decode_share: float) -> None:
        """Pin the partition from the next step on, for measurements."""
        self._manager = PartitionManager(replace(self._partition_settings, decode_share=decode_share), self._all_cores)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._agent is not None:
            self._agent.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        if self._agent is not None:
            self._agent.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer what the agent loads, and what the prefill worker computes after that."""
        num_loaded: int | None = 0
        if self._agent is not None:
            num_loaded, _ = self._agent.get_num_new_matched_tokens(request, num_computed_tokens)
        self._offers.pop(request.request_id, None)
        if num_loaded is None:
            return None, False
        start, end = num_computed_tokens + num_loaded, request.num_tokens - 1
        is_computable = end - start >= MIN_PREFILL_TOKENS and has_context(self._groups, start, end)
        is_accepted = self._prefill.accepts_orders() and request.request_id not in self._refused
        if not (is_computable and is_accepted and _is_text(request)):
            return num_loaded, bool(num_loaded)
        self._offers[request.request_id] = Offer(num_computed_tokens, num_loaded, end)
        return end - num_computed_tokens, True

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all groups: the prefill worker zeroes what must be zero."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        offer = self._offers.pop(request.request_id, None) if num_external_tokens else None
        num_loaded = num_external_tokens if offer is None else offer.num_loaded
        if self._agent is not None:
            self._agent.update_state_after_alloc(request, blocks, num_loaded)
        if offer is None:
            return
        tables = tuple(tuple(table) for table in blocks.get_block_ids())
        if num_loaded:
            self._loads[request.request_id] = (offer, request, tables)
        else:
            self._order(request, offer.start, offer.end, tables)

    def _order(self, request: Any, start: int, end: int, tables: tuple[tuple[int, ...], ...]) -> None:
        token_ids = tuple(request.all_token_ids[: end + 1])
        self._prefill.add(Order(request.request_id, token_ids, start, end, tables))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        batch = len(scheduler_output.num_scheduled_tokens)
        cores, prefill_cores = self._manager.next(StepLoad(batch, self._prefill.is_busy))
        self._await_step(prefill_cores, is_urgent=bool(scheduler_output.scheduled_new_reqs))
        refused = frozenset(self._prefill.take_refused())
        self._refused |= refused
        step = ColocatedStep(cores, refused)
        if self._agent is not None:
            step.agent_step = self._agent.build_connector_meta(scheduler_output)
        self._idles = not batch
        return step

    def _await_step(self, prefill_cores: Cores, *, is_urgent: bool) -> None:
        """Wait until decode's next step has to begin, with prefill on all cores. Then give it its own."""
        steps = sorted(self._steps)
        step_seconds = steps[len(steps) * 3 // 4] if steps else math.inf
        pause = self._manager.pause_seconds(step_seconds, time.monotonic() - self._step_ended)
        self._prefill.flush(self._all_cores if pause else prefill_cores)
        if pause or self._was_paced:
            self._prefill.lend(self._all_cores, prefill_cores, 0.0 if is_urgent else pause)
        self._was_paced = bool(pause)
        self._step_started = time.monotonic()

    def update_connector_output(self, connector_output: Any) -> None:
        """Replace finished loads by finished prompts."""
        self._step_ended = time.monotonic()
        if not self._idles:
            self._steps.append(self._step_ended - self._step_started)
        report = connector_output.kv_connector_worker_meta
        received = set(connector_output.finished_recving or ())
        failed = set(connector_output.failed_recving or ())
        if self._agent is not None:
            connector_output.kv_connector_worker_meta = report.of_agent if report else None
            self._agent.update_connector_output(connector_output)
        for request_id in received & self._loads.keys():
            offer, request, tables = self._loads.pop(request_id)
            if request_id not in failed:  # After a failure vLLM asks again for the whole prompt.
                self._order(request, offer.start + offer.num_loaded, offer.end, tables)
                received.discard(request_id)
        waits = self._idles and self._prefill.is_busy and not received
        received |= self._prefill.take_finished(IDLE_WAIT_SECONDS if waits else 0.0)
        connector_output.finished_recving = received

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._offers.pop(request.request_id, None)
        self._loads.pop(request.request_id, None)
        self._refused.discard(request.request_id)
        self._prefill.cancel(request.request_id)
        if self._agent is None:
            return False, None
        return self._agent.request_finished_all_groups(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._prefill.is_busy or (self._agent is not None and self._agent.has_pending_push_work())

    def has_pending_block_frees(self) -> bool:
        return self._agent is not None and self._agent.has_pending_block_frees()

    def reset_cache(self) -> bool | None:
        return self._agent.reset_cache() if self._agent is not None else None

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._agent is not None:
            self._agent.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Take the cores of this step. vLLM calls this before it plans attention, which depends on the number of threads."""
        assert isinstance(kv_connector_metadata, ColocatedStep)
        if kv_connector_metadata.cores != self._cores:
            self._cores = kv_connector_metadata.cores
            resize_team(len(self._cores))
            move_threads(self._cores)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, ColocatedStep)
        self._newly_refused = connector_metadata.refused
        if self._agent is not None:
            self._agent.bind_connector_metadata(connector_metadata.agent_step)

    def has_connector_metadata(self) -> bool:
        return self._agent is not None and self._agent.has_connector_metadata()

    def clear_connector_metadata(self) -> None:
        if self._agent is not None:
            self._agent.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._agent is not None:
            self._agent.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._agent is not None:
            self._agent.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        if self._agent is not None:
            self._agent.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the agent's results, and the prompts that no prefill worker computes: vLLM schedules these again."""
        results = KVConnectorTransferResults()
        if self._agent is not None:
            results = self._agent.get_transfer_results(finished_req_ids)
        results.finished_recving |= self._newly_refused
        results.failed_recving |= self._newly_refused
        return results

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return StepReport(self._agent.build_connector_worker_meta() if self._agent is not None else None)

    # Both sides

    def get_kv_connector_stats(self) -> Any:
        return self._agent.get_kv_connector_stats() if self._agent is not None else None

    def shutdown(self) -> None:
        if self._agent is not None:
            self._agent.shutdown()
        if self.role == KVConnectorRole.SCHEDULER:
            self._prefill.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    build_kv_connector_stats: Callable[..., Any] = PrfaasConnector.build_kv_connector_stats
    build_prom_metrics: Callable[..., Any] = PrfaasConnector.build_prom_metrics


def _agent_connector(
    vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any, keys: dict[str, Any]
) -> PrfaasConnector:
    """Return the agent's connector, which reads its settings from the configuration that it is given."""
    config = copy.copy(vllm_config)
    config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    config.kv_transfer_config.kv_connector_extra_config = keys
    config.parallel_config = copy.copy(vllm_config.parallel_config)
    config.parallel_config.distributed_executor_backend = "uni"  # The forked worker is on this machine, as that one is.
    return PrfaasConnector(config, role, kv_cache_config)


def _is_text(request: Any) -> bool:
    """Return whether the prefill worker can compute the prompt. The decode engine computes any other."""
    extras: Iterable[Any] = (request.mm_features, request.lora_request, request.pooling_params, request.resumable)
    has_ids = request.prompt_token_ids is not None and request.prompt_embeds is None
    return has_ids and not any(extras) and not request.skip_reading_prefix_cache


def _check_supported(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ConfigError(f"colocation does not support {name}={getattr(parallel, name)}")
    if vllm_config.speculative_config is not None:
        raise ConfigError("colocation does not support speculative_config")
    if vllm_config.cache_config.mamba_cache_mode == "align":
        # vLLM would store states in the middle of a chunk, which its CPU kernels cannot.
        raise ConfigError("colocation of models with states needs --no-enable-prefix-caching")
