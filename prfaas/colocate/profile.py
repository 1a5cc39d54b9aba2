"""Profile of a model on this machine: decode steps and prompts on every share of the cores, and how they slow each other.

The engine runs in this process, with real workers. Its partition is pinned to one share after another.
"""

import contextlib
import itertools
import os
import platform
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

from prfaas import logs
from prfaas.colocate import serve
from prfaas.colocate.channel import SOCKET_VARIABLE
from prfaas.colocate.config import ColocateConfig
from prfaas.colocate.cores import all_cores, core_shares
from prfaas.config import show
from prfaas.errors import ConfigError
from prfaas.solve.files.profile_file import (
    ColocationPart,
    DecodeOnShare,
    DecodePart,
    DecodePoint,
    PrefillOnShare,
    PrefillPart,
    PrefillPoint,
    ProfileFile,
)

log = logs.get("colocate.profile")

BATCHES = (1, 4, 16)
CONTEXT_TOKENS = 512  # Of each decoding request beside a prompt.
LONG_CONTEXT_TOKENS = 2048  # Steps without a prompt beside them are measured at this context too.
PROMPTS = (256, 512, 1024)  # Prefilled with nothing beside them: three make a curve. Decode runs beside the longest.
STEPS = 20
WARM_UP_STEPS = 3
PROMPT_REPEATS = 2


class Bench:
    """An engine whose steps are timed one by one."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._connector = engine.engine_core.engine_core.scheduler.get_kv_connector()
        self._names = itertools.count()
        vocabulary = engine.vllm_config.model_config.get_vocab_size()
        self._token_ids = (number * 7919 % (vocabulary - 3) + 3 for number in itertools.count())
        self._loads: dict[str, float] = {}  # Start of each prompt that runs beside decode.
        self.prompt_seconds: list[float] = []
        self._max_model_len: int = engine.vllm_config.model_config.max_model_len
        self._kv_tokens: int = (
            engine.vllm_config.cache_config.kv_cache_size_tokens * 3 // 4
        )  # The rest is for new tokens.
        # Beside one prompt. A larger batch would never run as a whole.
        most = (self._kv_tokens - PROMPTS[-1]) // CONTEXT_TOKENS
        self.max_batch = min(engine.vllm_config.scheduler_config.max_num_seqs - 1, most)

    def pin(self, share: float) -> None:
        """Pin decode's share of the cores; 1 gives all cores to both."""
        self._connector.pin(share)

    def long_context(self, batch: int) -> int:
        """Return the longest context of a batch that the KV cache and the model's length leave room for."""
        return min(LONG_CONTEXT_TOKENS, self._max_model_len * 3 // 4, self._kv_tokens // batch)

    def prompt(self, num_tokens: int) -> float:
        """Return the seconds from a prompt's arrival to its token, with nothing beside it."""
        self._add_prompt(num_tokens)
        while self._loads:
            self._step()
        return self.prompt_seconds.pop()

    def steps(self, batch: int, *, context: int = CONTEXT_TOKENS, load: int = 0) -> float:
        """Return the median decode step of a batch, with prompts of `load` tokens beside it without pause."""
        self.prompt_seconds.clear()
        names = [self._add(context, 10_000) for _ in range(batch)]
        while self._num_running() < batch:
            self._step()
        seconds: list[float] = []
        while len(seconds) < WARM_UP_STEPS + STEPS or (load and not self.prompt_seconds):
            if load and not self._loads:
                self._add_prompt(load)
            started = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - started)
        self._engine.abort_request([*names, *self._loads])
        self._loads.clear()
        while self._engine.has_unfinished_requests():
            self._step()
        return statistics.median(seconds[WARM_UP_STEPS:])

    def _add_prompt(self, num_tokens: int) -> None:
        self._loads[self._add(num_tokens, 1)] = time.perf_counter()

    def _add(self, num_tokens: int, max_tokens: int) -> str:
        name = str(next(self._names))
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(
            name, {"prompt_token_ids": list(itertools.islice(self._token_ids, num_tokens))}, parameters
        )
        return name

    def _num_running(self) -> int:
        return len(self._engine.engine_core.engine_core.scheduler.running)

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished and output.request_id in self._loads:
                self.prompt_seconds.append(time.perf_counter() - self._loads.pop(output.request_id))


def measure(bench: Bench, shares: Sequence[float], batches: Sequence[int], *, model: str, name: str) -> ProfileFile:
    """Return the whole profile."""
    bench.pin(1.0)
    prompts = {number: min(bench.prompt(number) for _ in range(PROMPT_REPEATS)) for number in PROMPTS}
    contexts = [CONTEXT_TOKENS]
    if (longest := bench.long_context(batches[-1])) >= 2 * CONTEXT_TOKENS:
        contexts.append(longest)
    alone = [
        DecodePoint(batch=batch, context=context, step=bench.steps(batch, context=context))
        for context in contexts
        for batch in batches
    ]
    prefill, decode = [], []
    for share in (*shares, 1.0):
        bench.pin(share)
        beside = {batch: bench.steps(batch, load=PROMPTS[-1]) for batch in batches}
        decode += [DecodeOnShare(batch=batch, share=share, step=seconds) for batch, seconds in beside.items()]
        rest = round(1 - share, 4) if share < 1 else 1.0
        seconds = statistics.median(bench.prompt_seconds)
        prefill.append(PrefillOnShare(tokens=PROMPTS[-1], share=rest, seconds=seconds))
        log.info("share.measured", decode_share=share, seconds=list(beside.values()))
    return ProfileFile(
        name=name,
        hardware=f"CPU {platform.machine()}, {len(all_cores())} cores",
        model=model,
        source=f"prfaas-colocate profile, {time.strftime('%Y-%m-%d', time.gmtime())}: medians of {STEPS} steps",
        prefill=PrefillPart(points=tuple(PrefillPoint(tokens=number, seconds=prompts[number]) for number in prompts)),
        decode=DecodePart(points=tuple(alone)),
        colocation=ColocationPart(
            partition="affinity", context=CONTEXT_TOKENS, decode=tuple(decode), prefill=tuple(prefill)
        ),
    )


def write_profile(config: ColocateConfig, flags: Sequence[str]) -> None:
    """Measure every share of this machine's cores, and write the file.

    Raises:
        ConfigError: There is one core only, which cannot be shared, or vLLM's flags leave no room for a batch beside a prompt.
    """
    assert config.profile is not None
    shares = core_shares(len(all_cores()))
    if not shares:
        raise ConfigError("one core cannot be shared: measure on a machine with two or more")
    with running_bench(replace(config, profile=None), flags) as bench:
        batches = tuple(batch for batch in BATCHES if batch <= bench.max_batch)
        if not batches:
            raise ConfigError("a profile needs --max-num-seqs of at least 2, and KV memory for 2,048 tokens")
        file = measure(bench, shares, batches, model=str(config.model), name=config.profile.stem)
        config.profile.write_text(show(file), encoding="utf-8")
    log.info("profile.written", path=str(config.profile))


@contextlib.contextmanager
def running_bench(config: ColocateConfig, flags: Sequence[str]) -> Iterator[Bench]:
    """Yield an engine in this process, with a fork server of its own."""
    with tempfile.TemporaryDirectory(prefix="prfaas-colocate-") as folder:
        socket = Path(folder) / "fork-server"
        command, environment = serve.fork_server(socket)
        with subprocess.Popen(command, env=environment) as server:
            try:
                while not socket.exists():  # The fork server still imports its libraries.
                    if server.poll() is not None:
                        raise ConfigError("the fork server ended; its output says why")
                    time.sleep(0.1)
                os.environ |= serve.engine_environment(socket) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
                parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
                namespace = parser.parse_args([*serve.engine_flags(config), *flags])
                engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(namespace))
                yield Bench(engine)
                engine.engine_core.shutdown()
            finally:
                server.send_signal(signal.SIGKILL)
                os.environ.pop(SOCKET_VARIABLE, None)
