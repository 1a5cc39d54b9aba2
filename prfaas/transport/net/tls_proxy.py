"""A listening port before a server of this process: mutual TLS is done here, and the server can ask who came.

The server behind it listens on loopback and knows a connection by the port that it comes from; what comes to it past the
door has no name. So one place makes every TLS connection of a service, counts what it refuses, looks at the revocation list
and takes up files that change, whatever library serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator

from prfaas.errors import ConfigError
from prfaas.transport.net.tls import Certificates, TlsRefusal, common_name, refusal_reason
from prfaas.units import is_loopback, join_address, split_address

MAX_STRANGERS = 64  # whose handshakes are under way, at a port between components
HANDSHAKE_SECONDS = 5.0
SHUTDOWN_SECONDS = 1.0
INNER = "127.0.0.1:0"  # where a server behind a door listens
_READ_BYTES = 64 << 10
_BACKLOG = 256
_NO_FILES_SECONDS = 0.05


class TlsProxy:
    """One port. `bind`, `start`, `stop_listening` if others are to end by themselves, then `close`; all but `bind` on the
    loop."""

    def __init__(
        self,
        listen: str,
        certificates: Certificates,
        *,
        setting: str,
        refused: Callable[[TlsRefusal], None],
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        """`refused` hears why a connection was not let in; `max_strangers` shake hands at a time."""
        self._listen, self._setting = listen, setting
        self._certificates = certificates
        self._refused = refused
        self._names: dict[int, str] = {}  # of peers, by the port that their connection comes from on loopback
        self._max_strangers = max_strangers
        self._num_strangers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None
        self._inner = ("", 0)
        self.address = ""

    def bind(self) -> None:
        """Take the port; 0 takes a free one. Raises ConfigError when it is taken."""
        host, port = split_address(self._listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"{self._setting} {self._listen}: {error}") from error
        self._socket.setblocking(False)
        bound = self._socket.getsockname()[1]
        self.address = join_address(host, bound)

    def start(self, inner: str) -> None:
        """Let peers in, to a server at this address of loopback."""
        self._inner = split_address(inner)
        self._await_peers()

    def peer_name(self, port: int) -> str | None:
        """The name in the certificate of whoever came in, and reaches the server from this port of loopback."""
        return self._names.get(port)

    def stop_listening(self) -> None:
        """Give the port up; what is open goes on."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    async def close(self) -> None:
        """Let nobody in any more, and end what is open."""
        self.stop_listening()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports that were told to close do so in the loop's next turn

    def _await_peers(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._let_in)

    def _let_in(self) -> None:
        """One peer that has come; where too many shake hands already, the next waits."""
        assert self._socket is not None, "or nobody is awaited"
        loop = asyncio.get_running_loop()
        try:
            peer, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has left already
            return
        except OSError:  # no more files
            loop.remove_reader(self._socket)
            loop.call_later(_NO_FILES_SECONDS, self._await_peers)
            return
        peer.setblocking(False)
        self._num_strangers += 1
        if self._num_strangers == self._max_strangers:
            loop.remove_reader(self._socket)
        task = asyncio.create_task(self._serve(peer), name="tls connection")
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(task, peer))

    def _ended(self, task: asyncio.Task[None], peer: socket.socket) -> None:
        self._tasks.discard(task)
        peer.close()  # also of a task that was cancelled before it began

    async def _serve(self, peer: socket.socket) -> None:
        outer = await self._shake_hands(peer)
        if outer is None:
            return
        reader, writer = outer
        with _cut_off_after(writer):
            try:
                inner_reader, inner_writer = await asyncio.open_connection(*self._inner)
            except OSError:
                return
            with _cut_off_after(inner_writer):
                port = inner_writer.get_extra_info("sockname")[1]
                self._names[port] = common_name(writer.get_extra_info("peercert"))
                try:
                    await _join((reader, inner_writer), (inner_reader, writer))
                finally:
                    del self._names[port]
                    await asyncio.gather(_end(inner_writer), _end(writer))

    async def _shake_hands(self, peer: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                peer,
                ssl=self._certificates.server_context(),
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
        except OSError as error:
            self._refused(refusal_reason(error) if isinstance(error, ssl.SSLError) else "tls_failed")
            return None
        finally:
            self._num_strangers -= 1
            self._await_peers()
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def tls_proxy_for(
    listen: str,
    certificates: Certificates | None,
    *,
    setting: str,
    allows_plaintext: bool,
    refused: Callable[[TlsRefusal], None],
) -> TlsProxy | None:
    """The door, bound, before pages at an address beyond loopback; None where they are served as they are.

    Raises:
        ConfigError: it is taken.
    """
    if allows_plaintext or is_loopback(split_address(listen)[0]):
        return None
    assert certificates is not None, "or the settings were refused (`check_consent`)"
    door = TlsProxy(listen, certificates, setting=setting, refused=refused)
    door.bind()
    return door


@contextlib.contextmanager
def _cut_off_after(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Whatever ends the block, also where it is cancelled before an orderly end has begun."""
    try:
        yield
    finally:
        writer.transport.abort()


async def _end(writer: asyncio.StreamWriter) -> None:
    """Close, and give what is still to go out a moment."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            await writer.wait_closed()


async def _join(*ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Carry bytes both ways until one side ends, and then what it still sent."""
    carrying = [asyncio.create_task(_carry(*way)) for way in ways]
    try:
        await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # which ends the connection as an orderly end does
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
