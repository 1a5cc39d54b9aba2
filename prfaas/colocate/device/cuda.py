"""Steps on a GPU: decode as CUDA graphs, prefill as plain launches, each on the stream of its side's share.

The host never waits when it launches: inputs go through pinned memory, of which there are two sets because one step may
be under way while the next is prepared; results come back the same way with an event. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from prfaas.colocate.device.runner import TABLE, Row, Step, decode_step, fill_inputs
from prfaas.colocate.device.streams import Streams
from prfaas.colocate.model.model import HybridModel, PromptPart
from prfaas.colocate.prefill.queue import Prompt

NUM_STAGES = 2  # pinned sets: one for the step under way, one for the step being prepared


@dataclass(frozen=True)
class LaunchedStep:
    """`result` is pinned and valid once `event` has passed, until two steps later."""

    result: torch.Tensor
    event: torch.cuda.Event

    def done(self) -> bool:
        return bool(self.event.query())

    def tokens(self) -> list[int]:
        self.event.synchronize()
        return [int(token) for token in self.result.tolist()]


class CudaRunner:
    """One side's. Graphs are captured when a batch size, table width and share first occur together."""

    def __init__(self, model: HybridModel, *, max_rows: int, max_blocks: int, streams: Streams) -> None:
        self._model, self._streams = model, streams
        self._device = model.cache.kv.device
        sizes = (max_rows, TABLE + max_blocks)
        self._stages = [torch.zeros(sizes, dtype=torch.int64, pin_memory=True) for _ in range(NUM_STAGES)]
        self._results = [torch.zeros(max_rows, dtype=torch.int64, pin_memory=True) for _ in range(NUM_STAGES)]
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        self._graphs: dict[tuple[int, int, float], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._last: torch.cuda.Event | None = None
        self._num_launched = 0

    def decode(self, rows: list[Row], *, share: float) -> Step:
        stage = fill_inputs(self._stages[self._num_launched % NUM_STAGES], rows)
        stream = self._streams.of(share)
        key = (*stage.shape, share)
        if key not in self._graphs:
            self._graphs[key] = self._capture(tuple(stage.shape), stream)
        graph, inputs = self._graphs[key]

        def launch() -> torch.Tensor:
            inputs.copy_(stage, non_blocking=True)
            graph.replay()
            return self._tokens[: len(inputs)]

        return self._launch(launch, stream)

    def prefill(self, prompt: Prompt, *, share: float) -> Step:
        tokens = (
            torch.tensor(prompt.request.tokens[prompt.num_cached :]).pin_memory().to(self._device, non_blocking=True)
        )
        table = torch.tensor(prompt.blocks).pin_memory().to(self._device, non_blocking=True)
        part = PromptPart(tokens, prompt.num_cached, prompt.slot, table)
        stream = self._streams.of(share)
        stream.wait_stream(torch.cuda.current_stream())  # where the two copies above were queued
        return self._launch(lambda: self._model.next_tokens(None, part), stream)

    def _launch(self, launch: Callable[[], torch.Tensor], stream: torch.cuda.Stream) -> Step:
        """Queue work behind the last step, whose stream another share may have owned, and its result behind it."""
        result = self._results[self._num_launched % NUM_STAGES]
        self._num_launched += 1
        with torch.cuda.stream(stream):
            if self._last is not None:
                stream.wait_event(self._last)
            tokens = launch()
            result[: len(tokens)].copy_(tokens, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        self._last = event
        return LaunchedStep(result[: len(tokens)], event)

    def _capture(self, size: tuple[int, ...], stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Return a graph of one step of this size. Its warm-up rows are idle ones, which write to scratch alone.

        A graph captured on the stream of a green context replays on that context's part of the device.
        """
        inputs = torch.zeros(size, dtype=torch.int64, device=self._device)
        kept = self._tokens.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            decode_step(self._model, inputs, self._tokens)  # cuBLAS makes its workspaces outside of the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            decode_step(self._model, inputs, self._tokens)
        self._tokens.copy_(kept)
        torch.cuda.synchronize()
        return graph, inputs
