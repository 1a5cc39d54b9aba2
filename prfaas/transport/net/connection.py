"""Connection of a link: frames over one socket."""

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prfaas.transport.congestion.connection_policy import NOT_SENT_LOW_WATER_BYTES, RATE_BASED, not_sent_low_water
from prfaas.transport.net.sockets import (
    SEND_SECONDS,
    UNMARKED,
    PacketMarks,
    PlainStream,
    TcpInfo,
    make_socket,
    mark,
    read_tcp_info,
)
from prfaas.transport.net.tls import Certificates, TlsStream
from prfaas.transport.protocol.wire import (
    HEADER_BYTES,
    TRANSITIONS,
    ConnectionState,
    ConnectionStep,
    Header,
    state_after,
)

HANDSHAKE_SECONDS = 5.0  # For each of the four reads of a handshake.
# A connection without received bytes for longer is closed. PING is sent after a third of it.
# Transfers fail earlier, after `silence_seconds`.
SILENCE_SECONDS = 15.0
HEARTBEAT_SECONDS = 0.5  # A sender that has transfers sends PING at least so often on an idle connection.
FRAME_SECONDS = 60.0  # Longest time that one frame may take.
LEAVE_SECONDS = 1.0  # A refused peer is listened to for at most twice as long.
LEAVE_STEP_BYTES = 64 << 10
# Room for frames that are written at once. The kernel takes twice as many beyond as many unsent ones, with TLS too.
AT_ONCE_BYTES = NOT_SENT_LOW_WATER_BYTES // 4
AT_ONCE_SECONDS = 0.01  # Far longer than a frame takes that the kernel has room for.
_SO_MAX_PACING_RATE, _UNPACED = 47, (1 << 64) - 1
_DATA_STATES = (ConnectionState.SENDING, ConnectionState.RECEIVING)


class Connection:
    """Frames over one socket. One thread reads; any thread writes, one frame at a time; any thread may abort."""

    def __init__(self, sock: socket.socket, *, state: ConnectionState = TRANSITIONS.initial) -> None:
        self.state = state
        self.certified_name: str | None = None  # Common name of the peer's certificate; None without TLS.
        self._socket = sock
        self._stream: PlainStream | TlsStream = PlainStream(sock)
        self._write_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._header = memoryview(bytearray(HEADER_BYTES))
        sock.settimeout(None)
        self._set_timeout(socket.SO_SNDTIMEO, SEND_SECONDS)
        self.set_read_timeout(HANDSHAKE_SECONDS)
        self._is_reading = False
        self._dscp = 0
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def secure(self, certificates: Certificates, *, is_listener: bool) -> None:
        """Encrypt everything that follows.

        Raises:
            OSError: the peer does not encrypt, or has no valid certificate.
        """
        stream = certificates.wrap(self._socket, is_listener=is_listener)
        self.certified_name = stream.handshake(within_seconds=HANDSHAKE_SECONDS)
        self._stream = stream

    def advance(self, step: ConnectionStep) -> None:
        """Change the state by a step of this end."""
        self.state = TRANSITIONS.next(self.state, step)

    def _set_timeout(self, option: int, seconds: float) -> None:
        whole = int(seconds)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, int((seconds - whole) * 1e6)))

    def set_read_timeout(self, seconds: float) -> None:
        """Set how long the peer may be silent."""
        self._set_timeout(socket.SO_RCVTIMEO, seconds)

    # Writing

    def write(self, *buffers: bytes | memoryview) -> None:
        """Write one frame.

        Raises:
            OSError: the connection is lost. It is also aborted if the peer takes only part of the frame.
        """
        with self._write_lock:
            try:
                self._stream.send(buffers, within_seconds=FRAME_SECONDS)
            except OSError:
                self.abort()
                raise

    def try_write(self, frame: bytes) -> bool:
        """Write one frame. Return False if the connection is lost."""
        try:
            self.write(frame)
            return True
        except OSError:
            return False

    def write_at_once(self, frame: bytes) -> bool:
        """Write a frame without waiting for the peer, a long one on a thread of its own.

        Returns:
            False while another frame is being written or the peer takes too little.

        Raises:
            OSError: as `write`.
        """
        if not self.can_write_at_once() or not self._write_lock.acquire(timeout=AT_ONCE_SECONDS):
            return False
        is_handed_over = False
        try:
            if not self.can_write_at_once():
                return False
            if len(frame) <= AT_ONCE_BYTES:
                self._stream.send([frame], within_seconds=FRAME_SECONDS)
                return True
            with contextlib.suppress(RuntimeError):  # There may be room for another thread in a moment.
                threading.Thread(target=self._write_alone, args=(frame,), name="write", daemon=True).start()
                is_handed_over = True
            return is_handed_over
        except OSError:
            self.abort()
            raise
        finally:
            if not is_handed_over:
                self._write_lock.release()

    def can_write_at_once(self) -> bool:
        """Return whether the kernel has room for a short frame, or the connection is lost."""
        info = self.tcp_info()
        return self.wait_writable(0) and (info is None or info.unsent_bytes <= AT_ONCE_BYTES)

    def _write_alone(self, frame: bytes) -> None:
        """Write a frame and release the write lock, which `write_at_once` has acquired."""
        try:
            self._stream.send([frame], within_seconds=FRAME_SECONDS)
        except OSError:
            self.abort()
        finally:
            self._write_lock.release()

    def wait_writable(self, seconds: float) -> bool:
        """Wait until the kernel takes more or the connection is lost. Return False after the time-out."""
        writable = select.poll()  # Two threads may not wait with the same object.
        with contextlib.suppress(ValueError):  # The socket is closed.
            writable.register(self._socket, select.POLLOUT)
            return bool(writable.poll(seconds * 1000))
        return True

    # Reading

    def read_header(self) -> Header:
        """Return the next frame's header.

        Raises:
            BlockingIOError: no byte of it has arrived in time; it may still be read later.
            OSError: the connection is lost, or stopped within the header.
            RemoteProtocolError: the header is invalid, or the state does not allow the frame.
        """
        self._header[0] = 0
        try:
            self.read_into([self._header])
        except BlockingIOError as error:
            if self._header[0]:  # The magic does not begin with a zero.
                raise TimeoutError("the peer stopped within a header") from error
            raise
        header = Header.decode(self._header)
        self.state = state_after(self.state, header.type)
        return header

    def read_payload(self, header: Header) -> bytearray:
        """Return a control frame's payload, whose length was checked with the header."""
        payload = bytearray(header.length)
        if payload:
            self.read_into([memoryview(payload)])
        return payload

    def read_into(self, views: Sequence[memoryview]) -> None:
        """Fill `views` with the next bytes.

        Raises:
            OSError: the connection is lost, or silent for too long, or too slow.
        """
        within_seconds = FRAME_SECONDS if self.state in _DATA_STATES else HANDSHAKE_SECONDS
        self._is_reading = True
        self._stream.receive(views, within_seconds=within_seconds)
        self._is_reading = False

    def has_input(self) -> bool:
        """Return whether bytes of the peer wait to be read."""
        return self._stream.has_input() or bool(self._readable.poll(0))

    @property
    def is_worn(self) -> bool:
        """Return whether the keys have served long enough: another connection should take over."""
        return self._stream.is_worn

    @property
    def is_worn_out(self) -> bool:
        """Return whether the sending peer should have retired the connection by now."""
        return self._stream.is_worn_out

    # Kernel

    def tcp_info(self) -> TcpInfo | None:
        """Return the kernel's figures of this connection."""
        return read_tcp_info(self._socket)

    def quiet_seconds(self) -> float:
        """Return the time since data of the peer arrived; 0 while nobody reads, since the peer may be unable to send."""
        info = self.tcp_info() if self._is_reading else None
        return info.quiet_seconds if info is not None else 0.0

    def congestion_control(self) -> str:
        """Return the congestion control in use, which may differ from the configured one."""
        raw: bytes = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return raw.partition(b"\0")[0].decode()

    def search_rate(self) -> None:
        """Make the kernel search for a higher rate at once, doubling it each round trip.

        Switching to another congestion control and back restarts its search from the present rate.
        """
        current = self.congestion_control()
        if current in RATE_BASED:
            with contextlib.suppress(OSError):
                for name in ("reno", current):
                    self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())

    def choose_low_water(self) -> None:
        """Set how many unsent bytes the kernel may hold, by the round-trip time."""
        info = self.tcp_info()
        if info is not None:
            low_water = not_sent_low_water(rtt_seconds=info.min_rtt_seconds)
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, low_water)

    def mark(self, dscp: int) -> None:
        """Mark packets with this DSCP from now on."""
        if dscp != self._dscp:
            self._dscp = dscp
            with contextlib.suppress(OSError):  # The socket is closed, or not TCP over IP.
                mark(self._socket, dscp)

    def pace(self, bytes_per_second: float) -> None:
        """Make the kernel send no faster than this; infinity removes the limit."""
        rate = max(1, int(min(bytes_per_second, _UNPACED)))  # The kernel takes 0 as no limit.
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))

    # Ending

    def abort(self) -> None:
        """Make every thread that reads or writes raise an OSError; the owner then closes the connection."""
        with self._close_lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """After a last frame, discard input for a moment, so that the peer can read the frame and close.

        Closing a socket with unread bytes resets the connection (RFC 1122, section 4.2.2.13), and the kernel drops
        what it has not sent.
        """
        scrap, deadline = bytearray(LEAVE_STEP_BYTES), time.monotonic() + LEAVE_SECONDS
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self.set_read_timeout(LEAVE_SECONDS)
            while self._socket.recv_into(scrap) and time.monotonic() < deadline:
                pass

    def close(self) -> None:
        """Close the socket once no thread writes to it: its descriptor number may be reused at once."""
        self.abort()
        if self.state is not ConnectionState.CLOSED:
            self.advance(ConnectionStep.CLOSE)
        with self._write_lock, self._close_lock:
            self._socket.close()


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """Settings that both ends of a link have."""

    congestion_control: str = "bbr"
    silence_seconds: float = 2.0  # Transfers fail after this time without a connection or a sign of life.
    certificates: Certificates | None = None  # TLS is off without certificates.
    insecure_plaintext: bool = False  # Allows public addresses without certificates.
    marks: PacketMarks = UNMARKED

    @property
    def allows_public(self) -> bool:
        return self.insecure_plaintext or self.certificates is not None


@contextlib.contextmanager
def open_connection(address: str, config: WireConfig) -> Iterator[Connection]:
    """Dial an address, encrypted if there are certificates; the handshake is still to do. Close after the block.

    Raises:
        ConfigError: the address is public, and neither certificates nor `insecure_plaintext` are configured.
        OSError: nobody answers.
    """
    sock = make_socket(address, congestion_control=config.congestion_control, allow_public=config.allows_public)
    connection = Connection(sock)
    connection.mark(config.marks.interactive)
    try:
        if config.certificates is not None:
            connection.secure(config.certificates, is_listener=False)
        yield connection
    finally:
        connection.close()
