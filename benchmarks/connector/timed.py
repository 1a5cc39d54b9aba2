"""The connector with a clock: how much of an engine step's CPU time is spent inside its hooks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from prfaas import logs
from prfaas.connector.vllm.connector import PrfaasConnector

# What vLLM calls for every request or in every step; all of it runs on the model's thread.
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "update_connector_output",
    "request_finished_all_groups",
    "clear_connector_metadata",
)
FIRST_HOOK, LAST_HOOK = "build_connector_meta", "clear_connector_metadata"  # First and last hook of a step.
_log = logs.get("bench.connector")


@dataclass
class Clock:
    """CPU seconds of the model's thread, and a step's wall time. An engine of one process has one, for both its sides."""

    num_tokens: int = 0  # Tokens computed in the step.
    step_began: float = 0.0
    wall_began: float = 0.0
    inside: float = 0.0  # Seconds in hooks since the last report.
    inside_wall: float = 0.0  # Wall-clock seconds, waits included.
    depth: int = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            start, start_wall = time.thread_time(), time.perf_counter()
            self.depth += 1
            try:
                return function(*arguments, **named)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.inside += time.thread_time() - start
                    self.inside_wall += time.perf_counter() - start_wall

        return call

    def begin_step(self, num_tokens: int) -> None:
        self.num_tokens, self.step_began, self.wall_began = num_tokens, time.thread_time(), time.perf_counter()

    def end_step(self) -> None:
        step, wall = time.thread_time() - self.step_began, time.perf_counter() - self.wall_began
        if self.num_tokens:  # An idle engine makes many empty steps.
            _log.info(
                "step.cost",
                num_tokens=self.num_tokens,
                hook_seconds=self.inside,
                hook_wall_seconds=self.inside_wall,
                step_seconds=step,
                wall_seconds=wall,
                began=self.wall_began,
            )
        self.inside = self.inside_wall = 0.0


CLOCK = Clock()


class TimedConnector(PrfaasConnector):
    """Logs one line per step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        for name in HOOKS:
            setattr(self, name, CLOCK.timed(getattr(self, name)))
        inner_first, inner_last = getattr(self, FIRST_HOOK), getattr(self, LAST_HOOK)

        def first(output: Any) -> Any:
            CLOCK.begin_step(output.total_num_scheduled_tokens)
            return inner_first(output)

        def last() -> None:
            inner_last()
            CLOCK.end_step()

        setattr(self, FIRST_HOOK, first)
        setattr(self, LAST_HOOK, last)

    def _hook_linear_layers(self, modules: dict[str, Any]) -> None:
        assert self._worker is not None
        setattr(self._worker, "on_layer_end", CLOCK.timed(self._worker.on_layer_end))  # noqa: B010
        super()._hook_linear_layers(modules)
