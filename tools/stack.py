"""Processes of a deployment on this machine: agents, vLLM engines, manager, router and others."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prfaas.kv.layout import Layout
from tools.demo.client import is_answering
from tools.free_ports import free_address
from tools.processes import Child, Children

START_SECONDS = 600.0  # Two engines of two ranks each took 190 to 270 s on two busy cores.
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # The default pins every engine to the same core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # Use one process instead of three.
    "OMP_NUM_THREADS": "1",
}
# Eager engines compile one helper, for which the first request for log-probabilities would wait 2 to 8 s.
EAGER_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class AgentProcess:
    """Running `prfaas-agent`."""

    child: Child
    name: str
    socket: Path
    wire: str
    status_url: str


@dataclass(frozen=True)
class EngineProcess:
    """Running vLLM OpenAI server with the connector."""

    child: Child
    url: str


class Stack:
    """Starter of the processes of a deployment, which stop with `children`."""

    def __init__(self, children: Children, directory: Path) -> None:
        self._children = children
        self._directory = directory
        self.secret_file = directory / "secret"
        if not self.secret_file.exists():  # Several stacks of a deployment share the file.
            self.secret_file.touch(mode=0o600)
            self.secret_file.write_bytes(secrets.token_bytes(32))

    def start_agent(self, name: str, *, inside: Sequence[str] = (), **settings: Any) -> AgentProcess:
        """Start an agent. `inside` precedes its command, for example to enter a network namespace."""
        wire, status = settings.get("listen") or free_address(), free_address()
        socket = self._directory / f"{name}.sock"
        config = {
            "name": name,
            "socket": str(socket),
            "listen": wire,
            "status_listen": status,
            "secret_file": str(self.secret_file),
            "pool_bytes": "256MiB",
            **settings,
        }
        child = self._children.start(
            f"agent-{name}", [*inside, script("prfaas-agent"), "--config", self._write(f"agent-{name}", config)]
        )
        return AgentProcess(child, name, socket, wire, f"http://{status}")

    def start_engine(
        self,
        name: str,
        model: Path,
        *,
        agent: AgentProcess | None,
        role: str,
        extra: tuple[str, ...] = (),
        address: str | None = None,
        connector: Mapping[str, Any] | None = None,
        connector_class: tuple[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> EngineProcess:
        """Start a vLLM server whose connector attaches to `agent`; without an agent it has no connector.

        `role` is vLLM's `kv_role`. `connector` adds keys to `kv_connector_extra_config`. `connector_class` is the
        module and name of another connector.
        """
        address = address or free_address()
        host, _, port = address.rpartition(":")
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", model.name, "--host", host, "--port", port, "--dtype", _dtype(model)]
        command += extra
        if agent is not None:
            transfer = {
                "kv_connector": "PrfaasConnector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"agent_socket": str(agent.socket)} | dict(connector or {}),
            }
            if connector_class is not None:
                transfer["kv_connector_module_path"], transfer["kv_connector"] = connector_class
            command += ["--kv-transfer-config", json.dumps(transfer)]
        eager = EAGER_ENVIRONMENT if "--enforce-eager" in extra else {}
        child = self._children.start(
            f"vllm-{name}", command, environment={**ENGINE_ENVIRONMENT, **eager, **(environment or {})}
        )
        return EngineProcess(child, f"http://{address}")

    def start_manager(self, process_name: str = "manager", **settings: Any) -> tuple[Child, str, str]:
        """Start a manager; return (process, gRPC address, HTTP URL). It embeds Redis unless `redis_url` is set."""
        addresses = {"listen": free_address(), "http_listen": free_address()}
        config: dict[str, Any] = {**addresses, "secret_file": str(self.secret_file), **settings}
        command = [script("prfaas-manager"), "--config", self._write(process_name, config)]
        child = self._children.start(process_name, command)
        return child, config["listen"], f"http://{config['http_listen']}"

    def start_colocate(
        self,
        model: Path,
        *,
        extra: tuple[str, ...] = (),
        address: str | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> EngineProcess:
        """Start a colocated instance. `extra` are flags of vLLM, as for `start_engine`."""
        address = address or free_address()
        config = self._write("colocate", {"listen": address, "model": str(model), **settings})
        command = [script("prfaas-colocate"), "serve", "--config", config, "--"]
        command += ["--served-model-name", model.name, "--dtype", _dtype(model), *extra]
        eager = EAGER_ENVIRONMENT if "--enforce-eager" in extra else {}
        child = self._children.start(
            "colocate", command, environment={**ENGINE_ENVIRONMENT, **eager, **(environment or {})}
        )
        return EngineProcess(child, f"http://{address}")

    def start_sidecar(self, **settings: Any) -> tuple[Child, str, str]:
        """Start a sidecar; return (process, address, status address)."""
        config: dict[str, Any] = {"listen": free_address(), "status_listen": free_address(), **settings}
        child = self._children.start("sidecar", [script("prfaas-sidecar"), "--config", self._write("sidecar", config)])
        return child, config["listen"], config["status_listen"]

    def start_router(self, config: dict[str, Any], *, name: str = "router") -> tuple[Child, str]:
        address = free_address()
        path = self._write(name, {"listen": address, "secret_file": str(self.secret_file), **config})
        return self._children.start(name, [script("prfaas-router"), "--config", path]), f"http://{address}"

    def _write(self, name: str, config: dict[str, Any]) -> str:
        path = self._directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return str(path)

    def await_agent(self, agent: AgentProcess) -> None:
        self.await_server(agent.child, agent.status_url, path="/healthz")

    def await_server(self, child: Child, url: str, *, path: str = "/health") -> None:
        self._children.wait_until(child, lambda: is_answering(f"{url}{path}"), seconds=START_SECONDS)


def attached_layout(log: Path) -> Layout:
    """Return the layout that an engine has attached with, from its log.

    Raises:
        ValueError: The engine has not attached yet.
    """
    for line in log.read_text().splitlines():
        if '"engine.attached"' in line:
            return Layout.from_dict(json.loads(line[line.index("{") :])["layout"])
    raise ValueError(f"{log}: no engine has attached")


def engine_flags(*, chunk_tokens: int, max_model_len: int = 4096, cuda: bool = False) -> tuple[str, ...]:
    """Return vLLM flags for a tiny model: small caches, prefill in chunks of `chunk_tokens`."""
    sizes = ("--max-model-len", str(max_model_len), "--max-num-seqs", "8", "--no-enable-prefix-caching")
    chunked = ("--max-num-batched-tokens", str(chunk_tokens), "--enable-chunked-prefill")
    eager = () if cuda else ("--enforce-eager", "--kv-cache-memory-bytes", str(128 << 20))
    return (*sizes, *chunked, *eager)


def has_cuda() -> bool:
    return shutil.which("nvidia-smi") is not None


def _dtype(model: Path) -> str:
    """Return the model's own type. By default vLLM rounds float32 weights to 16 bits, which can flip near-ties."""
    config = json.loads((model / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype"))


def script(name: str) -> str:
    """Return the path of a console script in the current environment."""
    return str(Path(sys.executable).parent / name)
