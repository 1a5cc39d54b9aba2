"""One TCP connection of a link: made by one function, authenticated by a handshake, then frames."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
from typing import Any

import msgpack

from prfaas.errors import RemoteProtocolError
from prfaas.transport import tcp_info
from prfaas.transport.tcp_info import TcpInfo
from prfaas.transport.wire import HEADER_BYTES, FrameType, Header, control

HANDSHAKE_SECONDS = 10.0
SEND_SECONDS = 10.0  # a peer that takes nothing for this long is gone
SILENCE_SECONDS = 15.0  # a peer that says nothing for this long is gone; PING goes out at a third of it
NOT_SENT_LOW_WATER_BYTES = 128 << 10  # a connection takes new work only when its own is nearly on the wire
SEND_BUFFER_BYTES = 4 << 20  # measured: 1.9 times the default's bytes in flight over 30 ms
NONCE_BYTES = 32
_TCP_NOTSENT_LOWAT = 25


def make_socket(address: str, *, congestion_control: str) -> socket.socket:
    """Connect to `address`; every socket of the wire is made here.

    Raises:
        OSError: nobody answers.
    """
    host, _, port = address.rpartition(":")
    made = socket.create_connection((host.strip("[]"), int(port)), timeout=HANDSHAKE_SECONDS)
    tune(made, congestion_control=congestion_control)
    return made


def tune(connection: socket.socket, *, congestion_control: str) -> None:
    """Set what a long link needs; what the kernel refuses stays as it is."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER_BYTES)


class Connection:
    """Frames over one socket. One thread reads; any thread writes, one frame at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._write_lock = threading.Lock()
        self._header = bytearray(HEADER_BYTES)

    def write(self, header: bytes, payload: memoryview | bytes = b"") -> None:
        """Write one frame.

        Raises:
            OSError: the connection is gone or the peer takes nothing.
        """
        with self._write_lock:
            sent = self._socket.sendmsg([header, payload])
            total = len(header) + len(payload)
            while sent < total:
                if sent < len(header):
                    sent += self._socket.send(header[sent:])
                else:
                    sent += self._socket.send(memoryview(payload)[sent - len(header) :])

    def read_header(self) -> Header:
        """The next frame's header.

        Raises:
            OSError: the connection is gone, or silent for too long.
            RemoteProtocolError: it is no header.
        """
        self.read_into(memoryview(self._header))
        return Header.decode(self._header)

    def read_into(self, target: memoryview) -> None:
        got = 0
        while got < len(target):
            count = self._socket.recv_into(target[got:])
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            got += count

    def read_body(self, header: Header) -> Any:
        """The control payload of `header` as plain data."""
        payload = bytearray(header.length)
        self.read_into(memoryview(payload))
        try:
            return msgpack.unpackb(payload)
        except ValueError as error:
            raise RemoteProtocolError("body", f"{header.type.name}: not msgpack") from error

    def set_timeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def tcp_info(self) -> TcpInfo | None:
        """The kernel's figures of this connection."""
        return tcp_info.read(self._socket)

    def close(self) -> None:
        """Wake every thread that reads or writes, with an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # Handshake

    def _expect(self, kind: FrameType, fields: dict[str, type]) -> dict[str, Any]:
        header = self.read_header()
        if header.type is FrameType.ERROR:
            raise RemoteProtocolError("refused", str(self.read_body(header)))
        if header.type is not kind:
            raise RemoteProtocolError("order", f"{header.type.name} where {kind.name} belongs")
        body = self.read_body(header)
        if not isinstance(body, dict) or {name: type(value) for name, value in body.items()} != fields:
            raise RemoteProtocolError("body", f"{kind.name} has the fields {', '.join(fields)}")
        return body

    def dial_handshake(self, key: bytes, *, local_name: str, peer_name: str) -> None:
        """Prove to the listener that we know the secret, and have it prove the same."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.write(control(FrameType.HELLO, {"name": local_name, "nonce": nonce}))
        answer = self._expect(FrameType.CHALLENGE, {"name": str, "nonce": bytes, "proof": bytes})
        transcript = _transcript(local_name, nonce, answer["name"], answer["nonce"])
        if not hmac.compare_digest(answer["proof"], _proof(key, b"listener", transcript)):
            raise RemoteProtocolError("secret", "the peer does not know this deployment's secret")
        if answer["name"] != peer_name:
            raise RemoteProtocolError("name", f"{answer['name']} answers where {peer_name} was expected")
        self.write(control(FrameType.PROOF, {"proof": _proof(key, b"dialer", transcript)}))
        self._expect(FrameType.WELCOME, {})

    def listen_handshake(self, key: bytes, *, local_name: str) -> str:
        """The dialer's name, proven."""
        hello = self._expect(FrameType.HELLO, {"name": str, "nonce": bytes})
        nonce = secrets.token_bytes(NONCE_BYTES)
        transcript = _transcript(hello["name"], hello["nonce"], local_name, nonce)
        proof = _proof(key, b"listener", transcript)
        self.write(control(FrameType.CHALLENGE, {"name": local_name, "nonce": nonce, "proof": proof}))
        answer = self._expect(FrameType.PROOF, {"proof": bytes})
        if not hmac.compare_digest(answer["proof"], _proof(key, b"dialer", transcript)):
            raise RemoteProtocolError("secret", "the peer does not know this deployment's secret")
        self.write(control(FrameType.WELCOME, {}))
        name: str = hello["name"]
        return name


def _transcript(dialer: str, dialer_nonce: bytes, listener: str, listener_nonce: bytes) -> bytes:
    packed: bytes = msgpack.packb([dialer, dialer_nonce, listener, listener_nonce])
    return packed


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + transcript, hashlib.sha256)
