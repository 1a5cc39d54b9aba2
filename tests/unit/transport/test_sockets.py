"""Options of sockets, and the addresses that they may use."""

from __future__ import annotations

import socket

import pytest

from prfaas.errors import ConfigError
from prfaas.transport.congestion.connection_policy import NOT_SENT_LOW_WATER_BYTES
from prfaas.transport.net.sockets import SEND_SECONDS, make_socket, public_address, tune


@pytest.mark.parametrize("address", ["8.8.8.8:7000", "[2001:4860:4860::8888]:7000"])
def test_a_public_address_is_not_dialled_without_consent(address: str) -> None:
    with pytest.raises(ConfigError, match="is public; give the tls_ settings"):
        make_socket(address, congestion_control="bbr", allow_public=False)


def test_a_malformed_address_is_named() -> None:
    with pytest.raises(ConfigError, match="'nowhere' is not host:port"):
        make_socket("nowhere", congestion_control="bbr", allow_public=True)


@pytest.mark.parametrize(
    ("host", "is_public"), [("127.0.0.1", False), ("10.0.0.1", False), ("::", True), ("0.0.0.0", True)]
)
def test_binding_to_every_address_counts_as_public(host: str, is_public: bool) -> None:
    assert public_address(host) == (host if is_public else None)


def test_a_kernel_without_the_congestion_control_keeps_its_own() -> None:
    with socket.socket() as made:
        default = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        tune(made, congestion_control="no such thing")
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == default
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SEND_SECONDS * 1000
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == NOT_SENT_LOW_WATER_BYTES
