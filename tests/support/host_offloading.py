"""vLLM's tiered offloading on a CPU, where vLLM has no worker that copies between its blocks and the primary tier.

Everything but the copies is vLLM's. An engine names this module in `spec_module_path`.
"""

from itertools import accumulate, pairwise
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Spec whose worker copies at once. A chunk is one block."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        region = SharedOffloadRegion(
            self._engine_id, self.num_chunks, 0, self.kv_bytes_per_chunk, self.cpu_page_size_per_worker
        )
        return HostWorker(kv_caches, region)


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between blocks and rows of the primary tier, both in host memory."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._groups, self._region = caches.group_data_refs, region
        self._pages = [
            (cache.tensor, region.create_next_worker_view(cache.page_size_bytes)) for cache in caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.chunk_ids, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec.chunk_ids, is_store=False)

    def _copy(self, job_id: int, blocks: Any, chunk_ids: Any, *, is_store: bool) -> bool:
        bounds = pairwise(accumulate(blocks.group_sizes, initial=0))
        for refs, (start, end) in zip(self._groups, bounds, strict=True):
            pairs = list(zip(blocks.block_ids[start:end], chunk_ids[start:end], strict=True))
            for ref in refs:
                block_pages, rows = self._pages[ref.tensor_idx]
                for block, chunk in pairs:
                    page, row = block_pages[block], rows[chunk]
                    row.copy_(page) if is_store else page.copy_(row)
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pages.clear()
        self._region.cleanup()
