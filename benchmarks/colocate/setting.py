"""Setting of the benchmark: model, requests and chunks of the baselines."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.colocate.workload import Workload
from prfaas.colocate.model.cache import CacheShape


@dataclass(frozen=True)
class Setting:
    """Sizes of one benchmark run."""

    shape: str
    dtype: str
    block_tokens: int
    workload: Workload
    chunks: tuple[int, ...]
    long_prompt_tokens: int  # Prefill during which the ITL of a full batch is measured.
    partition: str
    matrix_size: int
    num_threads: int = 0

    @property
    def max_tokens(self) -> int:
        return max(self.workload.prompt_tokens + self.workload.answer_tokens, self.long_prompt_tokens) + 64

    @property
    def cache(self) -> CacheShape:
        blocks = -(-self.max_tokens // self.block_tokens)
        return CacheShape(
            1 + (self.workload.concurrency + 2) * (blocks + 1), self.block_tokens, self.workload.concurrency + 3
        )


CPU = Setting("small", "float32", 16, Workload(12, 4, 256, 24), (64, 128, 256), 1024, "affinity", 1024, 1)
