"""TLS proxy in front of a server of this process: ends mutual TLS, and names the peer of each connection.

The server listens on loopback and knows a connection by its source port there. A connection that does not come
through the proxy has no name. So each service accepts TLS in one place, whatever library serves: refusals are counted,
revocations are checked, and changed files are taken up.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Protocol

from prfaas.errors import ConfigError
from prfaas.transport.net.tls import Certificates, TlsRefusal, common_name, refusal_reason
from prfaas.units import is_loopback, join_address, split_address

MAX_HANDSHAKES = 64  # At a time, at a port between components.
HANDSHAKE_SECONDS = 5.0
SHUTDOWN_SECONDS = 1.0
INNER = "127.0.0.1:0"  # Address at which a server behind a proxy listens.
_READ_BYTES = 64 << 10
_BACKLOG = 256
_NO_DESCRIPTORS_SECONDS = 0.05


class PeerBudget(Protocol):
    """Limit on the connections of peers. `open` returns False beyond it, otherwise `close` follows."""

    def open(self, host: str) -> bool: ...

    def close(self, host: str) -> None: ...


class TlsProxy:
    """Proxy of one port. Call `bind`, `start`, optionally `stop_listening`, then `close`; all but `bind` on the loop."""

    def __init__(
        self,
        listen: str,
        certificates: Certificates,
        *,
        setting: str,
        refused: Callable[[TlsRefusal], None],
        max_handshakes: int = MAX_HANDSHAKES,
        budget: PeerBudget | None = None,
    ) -> None:
        """`refused` is called with the reason when a certificate is refused. `budget` limits connections; None for no limit."""
        self._listen, self._setting = listen, setting
        self._certificates = certificates
        self._refused = refused
        self._names: dict[int, str] = {}  # Peers, by the source port of their connection on loopback.
        self._hosts: dict[int, str] = {}  # Their addresses.
        self._budget = budget
        self._max_handshakes = max_handshakes
        self._num_handshakes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None
        self._inner = ("", 0)
        self.address = ""

    def bind(self) -> None:
        """Bind the port; 0 binds a free one. Raises ConfigError when the port is in use."""
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
        """Accept connections for a server at this loopback address."""
        self._inner = split_address(inner)
        self._resume_accepting()

    def peer_name(self, port: int) -> str | None:
        """Return the name in the certificate of the peer whose connection has this source port on loopback."""
        return self._names.get(port)

    def peer_host(self, port: int) -> str | None:
        """Return the address of the peer whose connection has this source port on loopback."""
        return self._hosts.get(port)

    def stop_listening(self) -> None:
        """Close the port; open connections go on."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    async def close(self) -> None:
        """Close the port and every connection."""
        self.stop_listening()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # Closed transports finish in the next iteration of the loop.

    def _resume_accepting(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accept one peer. Pause while too many handshakes are in progress."""
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        try:
            peer, (host, *_) = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # The peer has left already.
            return
        except OSError:  # Out of descriptors.
            loop.remove_reader(self._socket)
            loop.call_later(_NO_DESCRIPTORS_SECONDS, self._resume_accepting)
            return
        if self._budget is not None and not self._budget.open(host):
            peer.close()
            return
        peer.setblocking(False)
        self._num_handshakes += 1
        if self._num_handshakes == self._max_handshakes:
            loop.remove_reader(self._socket)
        task = asyncio.create_task(self._serve(peer, host), name="tls connection")
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._end_task(task, peer, host))

    def _end_task(self, task: asyncio.Task[None], peer: socket.socket, host: str) -> None:
        self._tasks.discard(task)
        peer.close()  # The task may have been cancelled before it began.
        if self._budget is not None:
            self._budget.close(host)

    async def _serve(self, peer: socket.socket, host: str) -> None:
        outer = await self._shake_hands(peer)
        if outer is None:
            return
        reader, writer = outer
        with _abort_after(writer):
            try:
                inner_reader, inner_writer = await asyncio.open_connection(*self._inner)
            except OSError:
                return
            with _abort_after(inner_writer):
                port = inner_writer.get_extra_info("sockname")[1]
                self._names[port] = common_name(writer.get_extra_info("peercert"))
                self._hosts[port] = host
                try:
                    await _join((reader, inner_writer), (inner_reader, writer))
                finally:
                    del self._names[port], self._hosts[port]
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
            self._num_handshakes -= 1
            self._resume_accepting()
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def tls_proxy_for(
    listen: str,
    certificates: Certificates | None,
    *,
    setting: str,
    allows_plaintext: bool,
    refused: Callable[[TlsRefusal], None],
) -> TlsProxy | None:
    """Return a bound proxy for pages at an address beyond loopback, or None where plain text is allowed.

    Raises:
        ConfigError: the port is taken.
    """
    if allows_plaintext or is_loopback(split_address(listen)[0]):
        return None
    assert certificates is not None, "`check_consent` has refused the settings"
    proxy = TlsProxy(listen, certificates, setting=setting, refused=refused)
    proxy.bind()
    return proxy


@contextlib.contextmanager
def _abort_after(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Abort the connection after the block, however it ends."""
    try:
        yield
    finally:
        writer.transport.abort()


async def _end(writer: asyncio.StreamWriter) -> None:
    """Close a connection after a moment for what is still to be sent."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            await writer.wait_closed()


async def _join(*directions: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Copy bytes in both directions until one side ends."""
    tasks = [asyncio.create_task(_copy(*direction)) for direction in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # An error ends the connection as a close does.
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
