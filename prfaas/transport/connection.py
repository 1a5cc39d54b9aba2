"""One TCP connection of the wire: made and tuned here, and nowhere else; frames go over it whole."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prfaas.errors import ConfigError
from prfaas.transport import tcp_info
from prfaas.transport.connection_policy import NOT_SENT_LOW_WATER_BYTES, RATE_BASED, not_sent_low_water
from prfaas.transport.tcp_info import TcpInfo
from prfaas.transport.tls import Certificates, TlsStream
from prfaas.transport.views import bytes_after, first_bytes
from prfaas.transport.wire import HEADER_BYTES, Header, State, next_state
from prfaas.units import is_public, split_address

CONNECT_SECONDS = 5.0
HANDSHAKE_SECONDS = 5.0  # for each read of the handshake, of which there are four
SEND_SECONDS = 10.0  # a peer that takes nothing for this long is gone
SILENCE_SECONDS = 15.0  # a peer that says nothing for this long is gone; PING goes out at a third of it
LEAVE_SECONDS = 1.0  # a peer that was refused is listened to for so long, at most twice
LEAVE_STEP_BYTES = 64 << 10
FRAME_SECONDS = 60.0  # a frame that has begun is there by then, or the connection ends
SEND_BUFFER_BYTES = 4 << 20  # measured: 1.9 times the default's bytes in flight over 30 ms
AT_ONCE_BYTES = NOT_SENT_LOW_WATER_BYTES // 4  # the kernel takes twice as many beyond as many unsent ones, with TLS too
AT_ONCE_SECONDS = 0.01  # far longer than a frame takes that the kernel has room for
RECEIVE_STEP_BYTES = 256 << 10  # a thread that reads a chunk is woken for so much, not for each packet
_TCP_NOTSENT_LOWAT = 25
_TCP_USER_TIMEOUT = 18
_SO_MAX_PACING_RATE, _UNPACED = 47, (1 << 64) - 1


class PlainStream:
    """Bytes as they are. One call gives or takes a whole chunk: the socket blocks, with the kernel's own time-outs."""

    is_worn = is_worn_out = False

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, buffers: Sequence[bytes | memoryview], *, within_seconds: float) -> int:
        """Send all of it; returns its length."""
        left, deadline = sum(map(len, buffers)), time.monotonic() + within_seconds
        total = left
        while left:
            sent = self._socket.sendmsg(buffers)
            left -= sent
            if left:
                if time.monotonic() > deadline:
                    raise TimeoutError("the peer takes a frame too slowly")
                buffers = bytes_after(buffers, sent)
        return total

    def receive(self, views: Sequence[memoryview], *, within_seconds: float) -> int:
        """Fill `views`; returns their length."""
        total, deadline = sum(map(len, views)), time.monotonic() + within_seconds
        if total >= 2 * RECEIVE_STEP_BYTES:
            # Only while a whole step is still to come: the last bytes of a transfer are followed by nothing.
            steps = total - RECEIVE_STEP_BYTES
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, RECEIVE_STEP_BYTES)
            self._fill(first_bytes(views, steps), deadline)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            views = bytes_after(views, steps)
        self._fill(views, deadline)
        return total

    def _fill(self, views: Sequence[memoryview], deadline: float) -> None:
        left = sum(map(len, views))
        while left:
            got = self._receive(views)
            left -= got
            if left:
                if time.monotonic() > deadline:
                    raise TimeoutError("a frame comes too slowly")
                views = bytes_after(views, got)

    def _receive(self, views: Sequence[memoryview]) -> int:
        if len(views) == 1:
            got = self._socket.recv_into(views[0], 0, socket.MSG_WAITALL)
        else:
            got = self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not got:
            raise ConnectionResetError("the peer closed the connection")
        return got

    def has_input(self) -> bool:
        """Nothing is kept here."""
        return False


def make_socket(address: str, *, congestion_control: str, allow_public: bool) -> socket.socket:
    """Connect to `address`; every socket of the wire is made here or in `listen`.

    Raises:
        ConfigError: it is no address, or public, and nobody has allowed that.
        OSError: nobody answers.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ConfigError(f"{address!r} is {error}") from error
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not allow_public and any(is_public(str(address[0])) for *_, address in found):
        raise ConfigError(
            f"{host} is public; give the tls_ settings, or set insecure_plaintext: true to send KV there unencrypted"
        )
    made = _connected(found)
    try:
        tune(made, congestion_control=congestion_control)
    except OSError:
        made.close()
        raise
    return made


def _connected(found: Iterable[tuple[int, int, int, str, Any]]) -> socket.socket:
    """A connection to the first of these addresses that answers, each as it was looked up: the next answer for a name may
    be an address that nobody has allowed, and a link-local one is nothing without its interface.

    Raises:
        OSError: none does.
    """
    failure = OSError("the name has no address")
    for family, kind, protocol, _, address in found:
        try:
            made = socket.socket(family, kind, protocol)
        except OSError as error:  # a family that this machine lacks
            failure = error
            continue
        try:
            made.settimeout(CONNECT_SECONDS)
            made.connect(address)
            return made
        except OSError as error:
            made.close()
            failure = error
    raise failure


def listen(address: str, *, allow_public: bool) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address is taken, or public, and nobody has allowed that.
    """
    host, port = split_address(address)
    try:
        if not allow_public and (public := public_address(host)):
            raise ConfigError(
                f"listen: {public} is not a private address; KV would cross it unencrypted. "
                "Give the tls_ settings, listen on a private address, or set insecure_plaintext: true"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"listen: {address} cannot be bound ({error.strerror})") from error


def public_address(host: str) -> str | None:
    """The first address of `host` that lies beyond private networks; binding to all of them counts."""
    found = socket.getaddrinfo(host, None)
    return host if any(is_public(str(address[0])) for *_, address in found) else None


def tune(connection: socket.socket, *, congestion_control: str) -> None:
    """Set what a long link needs; where the kernel refuses an optional setting its own default stays.

    SO_RCVBUF stays unset: setting it ends the kernel's own tuning, which reaches further.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(SEND_SECONDS * 1000))
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER_BYTES)


class Connection:
    """Frames over one socket. One thread reads; any thread writes, one frame at a time; any thread may abort."""

    def __init__(self, sock: socket.socket, *, state: State) -> None:
        self.state = state
        self.certified_name: str | None = None  # the common name of the peer's certificate; None: not encrypted
        self._socket = sock
        self._stream: PlainStream | TlsStream = PlainStream(sock)
        self._write_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._header = memoryview(bytearray(HEADER_BYTES))
        sock.settimeout(None)
        self._set_timeout(socket.SO_SNDTIMEO, SEND_SECONDS)
        self.set_read_timeout(HANDSHAKE_SECONDS)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def secure(self, certificates: Certificates, *, is_listener: bool) -> None:
        """Encrypt all that follows.

        Raises:
            OSError: the peer does not, or has no certificate that counts.
        """
        stream = certificates.wrap(self._socket, is_listener=is_listener)
        self.certified_name = stream.handshake(within_seconds=HANDSHAKE_SECONDS)
        self._stream = stream

    def _set_timeout(self, option: int, seconds: float) -> None:
        whole = int(seconds)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, int((seconds - whole) * 1e6)))

    def set_read_timeout(self, seconds: float) -> None:
        """How long the peer may be silent."""
        self._set_timeout(socket.SO_RCVTIMEO, seconds)

    # Writing

    def write(self, *buffers: bytes | memoryview) -> None:
        """Write one frame.

        Raises:
            OSError: the connection is gone, or the peer takes nothing.
        """
        with self._write_lock:
            self._stream.send(buffers, within_seconds=FRAME_SECONDS)

    def write_at_once(self, frame: bytes) -> bool:
        """Write a frame without waiting for the peer; a long one on a thread of its own, of which there is one at a time.

        Returns whether it has begun: it has not while another is being written, or the peer takes too little.

        Raises:
            OSError: the connection is gone.
        """
        if not self.takes_at_once() or not self._write_lock.acquire(timeout=AT_ONCE_SECONDS):
            return False
        is_handed_over = False
        try:
            if not self.takes_at_once():
                return False
            if len(frame) <= AT_ONCE_BYTES:
                self._stream.send([frame], within_seconds=FRAME_SECONDS)
                return True
            with contextlib.suppress(RuntimeError):  # of threads there may be more in a moment
                threading.Thread(target=self._write_alone, args=(frame,), name="write", daemon=True).start()
                is_handed_over = True
            return is_handed_over
        finally:
            if not is_handed_over:
                self._write_lock.release()

    def takes_at_once(self) -> bool:
        """Whether the kernel has room for a short frame; a connection that is gone counts as one that has."""
        info = self.tcp_info()
        return self.wait_writable(0) and (info is None or info.unsent_bytes <= AT_ONCE_BYTES)

    def _write_alone(self, frame: bytes) -> None:
        """With the write lock, which `write_at_once` has taken."""
        try:
            self._stream.send([frame], within_seconds=FRAME_SECONDS)
        except OSError:
            self.abort()
        finally:
            self._write_lock.release()

    def wait_writable(self, seconds: float) -> bool:
        """Whether the kernel takes more; a connection that is gone counts as writable."""
        writable = select.poll()  # of this call alone: any thread writes, and no two may wait with one
        with contextlib.suppress(ValueError):  # closed
            writable.register(self._socket, select.POLLOUT)
            return bool(writable.poll(seconds * 1000))
        return True

    # Reading

    def read_header(self) -> Header:
        """The next frame's header, if it may come now.

        Raises:
            BlockingIOError: nothing of it has come for too long; it may still be read later.
            OSError: the connection is gone, or stopped within it.
            RemoteProtocolError: it is no header, or not of a frame that may come now.
        """
        self._header[0] = 0
        try:
            self.read_into([self._header])
        except BlockingIOError as error:
            if self._header[0]:  # of the magic, which begins with no zero
                raise TimeoutError("the peer stopped within a header") from error
            raise
        header = Header.decode(self._header)
        self.state = next_state(self.state, header.type)
        return header

    def read_payload(self, header: Header) -> bytearray:
        """A control frame's payload; its length was checked with the header."""
        payload = bytearray(header.length)
        if payload:
            self.read_into([memoryview(payload)])
        return payload

    def read_into(self, views: Sequence[memoryview]) -> None:
        """Fill `views` with the next bytes.

        Raises:
            OSError: the connection is gone, or silent for too long, or too slow.
        """
        is_open = self.state in ("sending", "receiving")
        self._stream.receive(views, within_seconds=FRAME_SECONDS if is_open else HANDSHAKE_SECONDS)

    def has_input(self) -> bool:
        """Whether bytes of the peer wait to be read."""
        return self._stream.has_input() or bool(self._readable.poll(0))

    @property
    def is_worn(self) -> bool:
        """Whether its keys have served for long enough: another connection should take over."""
        return self._stream.is_worn

    @property
    def is_worn_out(self) -> bool:
        """Whether the peer, which sends, should have retired it."""
        return self._stream.is_worn_out

    # Ending

    def tcp_info(self) -> TcpInfo | None:
        """The kernel's figures of this connection."""
        return tcp_info.read(self._socket)

    def congestion_control(self) -> str:
        """What the kernel uses on this connection, which need not be what was asked for."""
        raw: bytes = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return raw.partition(b"\0")[0].decode()

    def search_rate(self) -> None:
        """Have the kernel look for a higher rate at once, doubling it each round trip, rather than by and by.

        Choosing another congestion control and this one again starts its search anew, from the present rate.
        """
        chosen = self.congestion_control()
        if chosen in RATE_BASED:
            with contextlib.suppress(OSError):
                for name in ("reno", chosen):
                    self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())

    def choose_low_water(self) -> None:
        """Hold as much unsent as a link of this round trip should; where the kernel does not tell it, the least."""
        info = self.tcp_info()
        if info is not None:
            low_water = not_sent_low_water(rtt_seconds=info.min_rtt_seconds)
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, low_water)

    def pace(self, bytes_per_second: float) -> None:
        """Have the kernel send no faster than this; infinity: as fast as it can."""
        rate = int(min(bytes_per_second, _UNPACED))
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))

    def abort(self) -> None:
        """Wake every thread that reads or writes, with an OSError; they, or their owner, then `close`."""
        with self._close_lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """After the last word: wait a moment for the peer to hear it and go, and throw away what it is still sending.

        A socket that is closed with bytes unread resets its connection (RFC 1122, section 4.2.2.13), and what the kernel
        had not sent yet is lost.
        """
        scrap, deadline = bytearray(LEAVE_STEP_BYTES), time.monotonic() + LEAVE_SECONDS
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self.set_read_timeout(LEAVE_SECONDS)
            while self._socket.recv_into(scrap) and time.monotonic() < deadline:
                pass

    def close(self) -> None:
        """Give the socket back, once nobody writes to it: the next one that this process makes has its number."""
        self.abort()
        with self._write_lock, self._close_lock:
            self._socket.close()


@contextlib.contextmanager
def dialled(
    address: str, *, congestion_control: str, certificates: Certificates | None, allow_public: bool
) -> Iterator[Connection]:
    """A connection to `address` before its handshake, encrypted when there are certificates; closed when the block ends.

    Raises:
        ConfigError: the address is public, there are no certificates, and nobody has allowed that.
        OSError: nobody answers.
    """
    allowed = allow_public or certificates is not None
    sock = make_socket(address, congestion_control=congestion_control, allow_public=allowed)
    connection = Connection(sock, state="challenge")
    try:
        if certificates is not None:
            connection.secure(certificates, is_listener=False)
        yield connection
    finally:
        connection.close()
