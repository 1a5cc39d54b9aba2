"""Peers that know the secret and send any frames that a test wants."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from prfaas.errors import RemoteProtocolError
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import Identity
from prfaas.transport.net.sockets import make_socket
from prfaas.transport.net.tls import Certificates
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import EndReason, ObjectSizes, Open
from prfaas.transport.protocol.wire import FrameType, Header, chunk_checksum, chunk_header
from prfaas.transport.ranges import Slab
from tests.support.transport_ends import KEY
from tests.support.waiting import PATIENCE_SECONDS


class RawSender:
    """One connection to a receiver, past its handshake."""

    def __init__(
        self,
        address: str,
        *,
        name: str = "raw",
        peer: str = "far",
        key: bytes = KEY,
        certificates: Certificates | None = None,
    ) -> None:
        self.connection = Connection(make_socket(address, congestion_control="bbr", allow_public=False))
        if certificates is not None:
            self.connection.secure(certificates, is_listener=False)
        handshake.dial(self.connection, Identity(name, key), peer_name=peer)
        self.connection.set_read_timeout(PATIENCE_SECONDS)

    def __enter__(self) -> RawSender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.connection.close()

    def open(
        self,
        *sizes: int,
        transfer_id: bytes | None = None,
        deadline_seconds: float = PATIENCE_SECONDS,
        body: bytes = b"body",
    ) -> bytes:
        """Open a transfer and read its HAVE. Skip REOPENs of transfers that earlier connections of this name left."""
        transfer_id = transfer_id or os.urandom(16)
        opened = Open(ObjectSizes.of(sizes), 0, deadline_seconds, body)
        self.connection.write(messages.encode_open(transfer_id, opened))
        while (header := self.heard()[0]).type is FrameType.REOPEN:
            pass
        assert header.type is FrameType.HAVE
        return transfer_id

    def chunk(self, transfer_id: bytes, slab: Slab, payload: bytes, *, checksum: int | None = None) -> None:
        correct = chunk_checksum(transfer_id, slab, [memoryview(payload)])
        self.connection.write(chunk_header(transfer_id, slab, correct if checksum is None else checksum), payload)

    def heard(self) -> tuple[Header, bytes]:
        """Return the next frame of the receiver."""
        header = self.connection.read_header()
        return header, bytes(self.connection.read_payload(header))

    def ping(self) -> list[FrameType]:
        """Send PING and return the types of the frames up to its PONG: everything sent before has been handled."""
        self.connection.write(Header(FrameType.PING, 0).encode())
        heard = [self.heard()[0].type]
        while heard[-1] is not FrameType.PONG:
            heard.append(self.heard()[0].type)
        return heard

    def refusal(self) -> EndReason:
        """Return the ERROR that the receiver sends before it closes the connection."""
        while True:
            header, payload = self.heard()
            if header.type is FrameType.ERROR:
                return messages.decode_ending(payload)


class RawReceiver:
    """Listens, completes every handshake, and then runs `serve` on a thread for each connection."""

    def __init__(self, serve: Callable[[Connection], None], *, certificates: Certificates | None = None) -> None:
        self._serve, self._certificates = serve, certificates
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._connections: list[Connection] = []
        self._threads = [threading.Thread(target=self._accept_forever)]
        self._threads[0].start()
        host, port = self._socket.getsockname()
        self.address = f"{host}:{port}"

    def __enter__(self) -> RawReceiver:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._connections:
            connection.abort()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def _accept_forever(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                connection = Connection(client)
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._run, args=(connection,)))
                self._threads[-1].start()

    def _run(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, RemoteProtocolError):
            if self._certificates is not None:
                connection.secure(self._certificates, is_listener=True)
            handshake.answer(connection, Identity("far", KEY, bytes(16)))
            self._serve(connection)
        connection.close()
