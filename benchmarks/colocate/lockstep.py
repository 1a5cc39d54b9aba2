"""The baseline under the same requests: chunked hybrid batching in one process, every pass in lockstep."""

from __future__ import annotations

import time

from benchmarks.colocate.lockstep_batching import Lockstep
from benchmarks.colocate.long_prompt import long_figures
from benchmarks.colocate.setting import Setting
from benchmarks.colocate.workload import Figures, Workload
from prfaas.colocate.device import devices
from prfaas.colocate.processes.messages import NO_STOP_TOKEN, Request


class Baseline:
    """Chunked hybrid batching under the same requests."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        shared = devices.allocate(setting.shape, setting.cache, dtype=setting.dtype, seed=1)
        tensors = (shared[0].tensor, shared[1].tensor, shared[2].tensor)
        self.model = devices.model_on(setting.shape, setting.cache, tensors, max_tokens=setting.max_tokens)

    def lockstep(self, chunk_tokens: int) -> Lockstep:
        setting = self.setting
        max_blocks = setting.cache.blocks_for(setting.max_tokens)
        rows = setting.workload.concurrency
        return Lockstep(self.model, setting.cache, chunk_tokens=chunk_tokens, max_rows=rows, max_blocks=max_blocks)

    def run(self, chunk_tokens: int) -> dict[str, object]:
        warm = Workload(self.setting.workload.concurrency, self.setting.workload.concurrency, 64, 8)
        self._drive(self.lockstep(chunk_tokens), warm)
        result: dict[str, object] = dict(self._drive(self.lockstep(chunk_tokens), self.setting.workload))
        result["long_prefill"] = self._long_prefill(self.lockstep(chunk_tokens))
        return result

    def _drive(self, lockstep: Lockstep, workload: Workload) -> dict[str, float]:
        figures, sent = Figures(), 0
        live = 0
        while sent < workload.num_requests or live:
            while live < workload.concurrency and sent < workload.num_requests:
                figures.start(sent, time.perf_counter())
                lockstep.add(Request(sent, 0, workload.answer_tokens, NO_STOP_TOKEN, workload.prompt(sent)))
                sent, live = sent + 1, live + 1
            for request, _ in lockstep.step():
                figures.arrivals[request].append(time.perf_counter())
                live -= len(figures.arrivals[request]) == workload.answer_tokens
        return figures.summary(answer_tokens=workload.answer_tokens)

    def _long_prefill(self, lockstep: Lockstep) -> dict[str, float]:
        setting = self.setting
        rows = setting.workload.concurrency - 1
        for number in range(rows):
            prompt = setting.workload.prompt(number)[:128]
            lockstep.add(Request(number, 0, setting.max_tokens - 192, NO_STOP_TOKEN, prompt))
        decoding: set[int] = set()
        while len(decoding) < rows:
            decoding |= {request for request, _ in lockstep.step()}
        last: dict[int, float] = {}
        gaps = []
        started = time.perf_counter()
        prompt = tuple(i % 256 for i in range(setting.long_prompt_tokens))
        lockstep.add(Request(rows, 0, 1, NO_STOP_TOKEN, prompt))
        while True:
            answers = dict(lockstep.step())
            now = time.perf_counter()
            gaps += [now - last[request] for request in answers if request in last]
            last |= dict.fromkeys(answers, now)
            if rows in answers:
                return long_figures(gaps, now - started, setting)
