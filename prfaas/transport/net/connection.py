"""What one connection of a link says of itself, so that a path that is worse than the others can be told.

Of a connection that has lived for days its whole life says little, and a third of a second is over when somebody looks: what
it sends again and what it waits for are of its last ten seconds.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prfaas.transport.congestion.connection_policy import NOT_SENT_LOW_WATER_BYTES, RATE_BASED, not_sent_low_water
from prfaas.transport.congestion.rate_estimator import LinkLimit, limit_of
from prfaas.transport.congestion.stall_detector import ConnectionLiveness
from prfaas.transport.net.sockets import SEND_SECONDS, Growth, PlainStream, TcpInfo, make_socket, read_tcp_info
from prfaas.transport.net.tls import Certificates, TlsStream
from prfaas.transport.protocol.wire import HEADER_BYTES, Header, State, next_state
from prfaas.units import join_address

RECENT_SECONDS, RECENT_STEP_SECONDS = 10.0, 1.0


class TcpHistory:
    """What has come to a connection of late, by the kernel."""

    def __init__(self, began_at: float) -> None:
        """Times are monotonic seconds."""
        self._seen: deque[tuple[float, TcpInfo | None]] = deque([(began_at, None)])

    def add(self, info: TcpInfo, now: float) -> None:
        """Take a look, of which there may be many more than are kept."""
        if now - self._seen[-1][0] < RECENT_STEP_SECONDS:
            return
        self._seen.append((now, info))
        while now - self._seen[1][0] >= RECENT_SECONDS:
            self._seen.popleft()

    def until(self, info: TcpInfo, now: float) -> tuple[float, Growth]:
        """Over how many seconds, and what."""
        at, before = self._seen[0]
        return now - at, info.grown_since(before)


@dataclass(frozen=True)
class ConnectionStats:
    """A connection at one moment; `resent_ratio` and `limit` are of its last ten seconds."""

    local_address: str
    remote_address: str
    age_seconds: float
    rtt_seconds: float  # the kernel's mean, which stays where the last burst left it
    min_rtt_seconds: float
    delivery_bytes_per_second: int  # as the kernel measured it last
    sent_bytes: int  # since it was made
    retransmitted_bytes: int  # of those
    resent_ratio: float  # of the bytes sent
    limit: LinkLimit | None  # what it mostly waited for; None: it has just been made
    unsent_bytes: int  # in its send buffer
    unacknowledged_bytes: int  # payload that it has taken and that the peer has not acknowledged
    still_seconds: float  # for how long chunks have waited on it and nothing has moved; 0: none wait

    @classmethod
    def of(
        cls,
        addresses: tuple[str, str],
        info: TcpInfo,
        *,
        recent: TcpHistory,
        pulse: ConnectionLiveness,
        unacknowledged_bytes: int,
        now: float,
    ) -> ConnectionStats:
        """By what the kernel says at present and has said of late; `addresses` are its two ends."""
        seconds, grown = recent.until(info, now)
        waits_since = pulse.waits_since
        return cls(
            *addresses,
            age_seconds=now - pulse.began_at,
            rtt_seconds=info.rtt_seconds,
            min_rtt_seconds=info.min_rtt_seconds,
            delivery_bytes_per_second=info.delivery_bytes_per_second,
            sent_bytes=info.bytes_sent,
            retransmitted_bytes=info.bytes_retransmitted,
            resent_ratio=grown.retransmitted_bytes / grown.sent_bytes if grown.sent_bytes else 0.0,
            limit=limit_of(
                seconds,
                busy_seconds=grown.busy_seconds,
                receiver_limited_seconds=grown.receiver_limited_seconds,
                buffer_limited_seconds=grown.buffer_limited_seconds,
            ),
            unsent_bytes=info.unsent_bytes,
            unacknowledged_bytes=unacknowledged_bytes,
            still_seconds=0.0 if waits_since is None else now - waits_since,
        )


HANDSHAKE_SECONDS = 5.0  # for each read of the handshake, of which there are four
SILENCE_SECONDS = 15.0  # a peer that says nothing for this long is gone; PING goes out at a third of it
LEAVE_SECONDS = 1.0  # a peer that was refused is listened to for so long, at most twice
LEAVE_STEP_BYTES = 64 << 10
FRAME_SECONDS = 60.0  # a frame that has begun is there by then, or the connection ends
AT_ONCE_BYTES = NOT_SENT_LOW_WATER_BYTES // 4  # the kernel takes twice as many beyond as many unsent ones, with TLS too
AT_ONCE_SECONDS = 0.01  # far longer than a frame takes that the kernel has room for
_SO_MAX_PACING_RATE, _UNPACED = 47, (1 << 64) - 1


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
            OSError: the connection is gone, or the peer takes nothing: no frame may follow a part of one, so it ends.
        """
        with self._write_lock:
            try:
                self._stream.send(buffers, within_seconds=FRAME_SECONDS)
            except OSError:
                self.abort()
                raise

    def write_at_once(self, frame: bytes) -> bool:
        """Write a frame without waiting for the peer; a long one on a thread of its own, of which there is one at a time.

        Returns whether it has begun: it has not while another is being written, or the peer takes too little.

        Raises:
            OSError: as `write`.
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
        except OSError:
            self.abort()
            raise
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
        return read_tcp_info(self._socket)

    def addresses(self) -> tuple[str, str] | None:
        """This end's and the peer's; None when the socket is closed."""
        with contextlib.suppress(OSError):
            own, peer = self._socket.getsockname(), self._socket.getpeername()
            return join_address(*own[:2]), join_address(*peer[:2])
        return None

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
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, low_water)

    def pace(self, bytes_per_second: float) -> None:
        """Have the kernel send no faster than this; infinity: as fast as it can."""
        rate = max(1, int(min(bytes_per_second, _UNPACED)))  # of which 0 would be as fast as it can, too
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
def open_connection(
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
