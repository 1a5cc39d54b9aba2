"""Agents that cannot bind an address or use a disk name the setting and leave nothing behind."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.agent.config import AgentConfig
from prfaas.agent.daemon import Agent
from prfaas.agent.engine.client import AgentClient
from prfaas.agent.status import StatusServer
from prfaas.errors import ConfigError
from tests.support.agents import Agents
from tools.demo.client import get_json


@pytest.fixture
def taken() -> Iterator[str]:
    """Address of a listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def _refuses_to_start(directory: Path, message: str, **settings: str | Path | int) -> None:
    values: dict[str, str | Path | int] = {"listen": "127.0.0.1:0", "status_listen": "127.0.0.1:0"}
    values |= {"socket": directory / "own.sock", "ssd_directory": directory / "ssd", "ssd_bytes": 1 << 20}
    values |= settings
    config = AgentConfig(name="n", secret_file=Path("s"), **values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        asyncio.run(Agent(config, os.urandom(32)).run())


def test_taken_wire_address_stops_the_start(tmp_path: Path, taken: str) -> None:
    # The second start fails for the same reason: the first has released the SSD.
    for _ in range(2):
        _refuses_to_start(tmp_path, f"listen: {taken} cannot be bound", listen=taken)


def test_taken_status_address_stops_the_start(tmp_path: Path, taken: str) -> None:
    _refuses_to_start(tmp_path, f"status_listen: {taken} cannot be bound", status_listen=taken)


def test_ssd_bytes_beyond_the_disk_stop_the_start(tmp_path: Path) -> None:
    _refuses_to_start(tmp_path, "ssd_bytes: .* and the disk of .*/ssd has [0-9]+MiB; write less", ssd_bytes=1 << 60)


def test_socket_of_a_living_agent_is_not_taken(agents: Agents, tmp_path: Path) -> None:
    living = agents.start("living")
    _refuses_to_start(tmp_path, "another agent listens", socket=living.socket)
    AgentClient(str(living.socket), instance="e", role="scheduler").close()


def test_status_pages_are_served_over_ipv6() -> None:
    try:
        server = StatusServer("[::1]:0", {"/healthz": lambda: {"status": "ok"}})
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    server.start()
    assert get_json(f"http://{server.address}/healthz") == {"status": "ok"}
    server.close()


@pytest.mark.parametrize("entry", ["west", "west=10.0.0.5", "west=h:x", "=10.0.0.5:7400"])
def test_agent_without_an_address_stops_the_start(entry: str) -> None:
    with pytest.raises(ValueError, match=r"fetch_from: .*write name=host:port"):
        AgentConfig(name="n", secret_file=Path("s"), fetch_from=(entry,))
