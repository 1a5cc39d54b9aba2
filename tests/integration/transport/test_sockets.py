"""Sockets dialled to names, whose addresses may change or need an interface."""

import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest

from prfaas.transport.net.sockets import make_socket


def test_a_name_is_looked_up_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look-up could return an address that is not allowed."""
    answers = iter(["127.0.0.1", "127.0.0.2"])
    look_up = socket.getaddrinfo

    def answer(host: str, *rest: Any, **more: Any) -> Any:
        return look_up(next(answers) if host == "far.example" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        made = make_socket(f"far.example:{port}", congestion_control="bbr", allow_public=False)
        assert made.getpeername() == ("127.0.0.1", port)
        made.close()


def _link_local_address() -> str | None:
    """Return a link-local address of this machine, with its interface."""
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        address, *_, interface = line.split()
        if address.startswith("fe80"):
            return f"{ipaddress.ip_address(bytes.fromhex(address))}%{interface}"
    return None


@pytest.mark.skipif(_link_local_address() is None, reason="needs an interface with a link-local address")
def test_a_name_of_a_link_local_address_is_dialled_at_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    address, look_up = _link_local_address(), socket.getaddrinfo

    def answer(host: str, *rest: Any, **more: Any) -> Any:
        return look_up(address if host == "near.local" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with socket.create_server(("::", 0), family=socket.AF_INET6) as server:
        name = f"near.local:{server.getsockname()[1]}"
        make_socket(name, congestion_control="bbr", allow_public=False).close()
