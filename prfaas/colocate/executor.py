"""Executor of the decode engine: its worker is forked from the loaded model instead of started anew."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # noqa: TID251 (vLLM names methods by functions)
from vllm import envs
from vllm.v1.executor.abstract import Executor

from prfaas.colocate.channel import START_SECONDS, Channel
from prfaas.colocate.messages import DecodeHello, Refused
from prfaas.colocate.watch import await_death


class PendingAnswer(Future[Any]):
    """Answer of the worker to one call, read when somebody asks for it. Answers come in the order of the calls."""

    def __init__(self, channel: Channel, *, is_single: bool) -> None:
        super().__init__()
        self._channel, self._is_single = channel, is_single

    def result(self, timeout: float | None = None) -> Any:
        """Return the answer.

        Raises:
            TimeoutError: The step takes longer than vLLM allows. The engine ends with this error.
        """
        if not self.done():
            # Calls to all workers load and compile, which may take any time.
            timeout = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS if self._is_single else timeout
            if not self._channel.has_message(timeout):
                raise TimeoutError("the decode worker does not answer")
            answer = self._channel.receive()
            if isinstance(answer, Exception):
                self.set_exception(answer)
            else:
                self.set_result(answer if self._is_single else [answer])
        return super().result()


class ForkedExecutor(Executor):
    """Executor with one worker. It fails when the worker dies, and the engine ends with it."""

    def _init_executor(self) -> None:
        """Have the fork server load the model, unless it has, and fork the worker."""
        self._channel = Channel.connect(wait_seconds=START_SECONDS)
        variables = {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "TORCHINDUCTOR_"))}
        self._channel.send(DecodeHello(self.vllm_config, variables))
        answer = self._channel.receive()
        if isinstance(answer, Refused):
            raise RuntimeError(answer.reason)
        self._worker = answer.process, os.pidfd_open(answer.process)

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        threading.Thread(target=self._await_death, args=(callback,), name="prfaas-worker-death", daemon=True).start()

    def _await_death(self, callback: Callable[[], None]) -> None:
        await_death(*self._worker)
        callback()

    def collective_rpc(
        self,
        method: str | bytes | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        is_single: bool = False,
    ) -> Any:
        """Run a method of the worker. Every call is answered in order, so `timeout` is not needed."""
        if callable(method):
            method = cloudpickle.dumps(method)
        self._channel.send((method, args, kwargs or {}))
        answer = PendingAnswer(self._channel, is_single=is_single)
        return answer if non_block else answer.result()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        return self.collective_rpc("execute_model", args=(scheduler_output,), non_block=non_block, is_single=True)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self.collective_rpc("sample_tokens", args=(grammar_output,), non_block=non_block, is_single=True)

    def check_health(self) -> None:
        """Do nothing: the failure callback tells of a lost worker."""

    def shutdown(self) -> None:
        """Let the worker go; it ends with its channel."""
        self._channel.close()
