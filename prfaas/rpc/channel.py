"""Connection to one manager, with its errors translated."""

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from prfaas import tracing
from prfaas.errors import FencedError, IndexRefusal, ManagerUnreachable, PrfaasError
from prfaas.rpc.methods import client_calls
from prfaas.rpc.tasks import cancel_tasks
from prfaas.rpc.tokens import REASON_KEY, WRITER_KEY, credentials
from prfaas.transport.net.tls import CertificateFiles, describe_certificate

_PLAIN_TEXT = "WRONG_VERSION_NUMBER"
_REFUSED_HERE = ("handshake failed", "Hostname Verification Check failed")
_HUNG_UP = ("Socket closed", "Connection reset", "Broken pipe")
_NOT_OPENED = "last error: "  # Marks a connection that could not be opened; open ones end with other texts.
_CHECK_PERIOD_SECONDS = 10.0  # A check is a handshake, and a router may see a thousand failed calls.


def connection_hint(details: str, *, address: str, tls: CertificateFiles | None) -> str:
    """Return the likely reason why a connection failed, in addition to gRPC's text; empty if that says enough."""
    if _NOT_OPENED in details and any(word in details for word in _HUNG_UP):
        if tls is None:
            return (
                "; the manager closed the connection: if it requires certificates, "
                "set tls with authority, certificate and key"
            )
        check = _cached_check(tls, int(time.time() / _CHECK_PERIOD_SECONDS))
        return f"; the manager closed the connection, because it stops or refuses the certificate; {check}"
    if tls is not None and _PLAIN_TEXT in details:
        return "; the manager answers in plain text: give it certificates, or remove tls from these settings"
    if tls is not None and any(word in details for word in _REFUSED_HERE):
        wanted = f"it must be valid, for {address.rpartition(':')[0]} and signed by {tls.authority}"
        command = f"openssl s_client -connect {address} -CAfile {tls.authority} -verify_return_error"
        return f"; this side refuses the manager's certificate: {wanted}; {command}"
    return ""


@functools.lru_cache(maxsize=8)
def _cached_check(tls: CertificateFiles, period: int) -> str:
    """Return the check of the own certificate, once per period."""
    return describe_certificate(tls)


os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # The library would also print the errors that it raises.


MAX_MESSAGE_BYTES = 16 << 20  # A prompt of a million tokens has 1 MiB of unit hashes.
_KEEPALIVE_MILLISECONDS = 5000
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MILLISECONDS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MILLISECONDS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


@dataclass(eq=False)
class _ChannelConnection:
    """One gRPC channel with the certificates of its time."""

    channel: Any
    calls: Any
    num_running: int = 0


class Channel:
    """Calls to one manager: `await channel.call("Match", request, timeout_seconds=...)`."""

    def __init__(self, address: str, *, name: str, secret: bytes, tls: CertificateFiles | None = None) -> None:
        """Create the channel; it connects with the first call.

        Raises:
            ManagerUnreachable: a certificate file cannot be read.
        """
        self.address = address
        self.metadata = credentials(name, secret)
        self._tls = tls
        self._changed_at = self._changes()
        try:
            self._connection = self._open(address, tls)
        except OSError as error:
            raise ManagerUnreachable(f"manager {address}: {error}") from error
        self._retired: set[_ChannelConnection] = set()  # Connections with older certificates, which finish their calls.
        self._closing: set[asyncio.Task[None]] = set()

    @staticmethod
    def _open(address: str, tls: CertificateFiles | None) -> _ChannelConnection:
        if tls is None:
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            assert tls.authority is not None, "required to trust any manager"
            chain = (tls.authority.read_bytes(), tls.key.read_bytes(), tls.certificate.read_bytes())
            channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*chain), options=_OPTIONS)
        return _ChannelConnection(channel, client_calls(channel))

    @property
    def connection(self) -> object:
        """Return the connection of new calls. It changes with the certificate files."""
        self._reload_certificates()
        return self._connection

    async def call(self, method: str, request: Any, *, timeout_seconds: float) -> Any:
        """Call a method and return its response.

        Raises:
            ManagerUnreachable: there is no answer in time.
            FencedError: another manager writes this cluster.
            IndexRefusal: the manager refuses the request; `reason` says why.
        """
        with self.translated_errors():
            metadata = (*self.metadata, *tracing.headers().items())
            return await self._begin(method, request, timeout=timeout_seconds, metadata=metadata)

    def stream(self, method: str, *arguments: Any) -> Any:
        """Return the call object of a streaming method; use it within `translated_errors`."""
        return self._begin(method, *arguments, metadata=self.metadata)

    def _begin(self, method: str, *arguments: Any, **options: Any) -> Any:
        self._reload_certificates()
        opened = self._connection
        call = opened.calls[method](*arguments, **options)
        opened.num_running += 1
        call.add_done_callback(functools.partial(self._note_end, opened))
        return call

    def _note_end(self, opened: _ChannelConnection, _call: Any) -> None:
        opened.num_running -= 1
        with contextlib.suppress(RuntimeError):  # The call may outlive its event loop.
            self._close_if_idle(opened)

    def _close_if_idle(self, opened: _ChannelConnection) -> None:
        """Close a retired connection after its last call: while open, it would use its old certificate."""
        if opened.num_running or opened not in self._retired:
            return
        self._retired.discard(opened)
        task = asyncio.get_running_loop().create_task(opened.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _reload_certificates(self) -> None:
        """Use new certificates once the files have changed. Files that cannot be read yet change nothing."""
        changed_at = self._changes()
        if changed_at == self._changed_at:
            return
        with contextlib.suppress(OSError):
            renewed = self._open(self.address, self._tls)
            retired, self._connection, self._changed_at = self._connection, renewed, changed_at
            self._retired.add(retired)
            self._close_if_idle(retired)

    def _changes(self) -> tuple[int, ...]:
        if self._tls is None:
            return ()
        with contextlib.suppress(OSError):
            return tuple(path.stat().st_mtime_ns for path in self._tls.paths)
        return ()

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Translate gRPC's errors."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error

    def _translated(self, error: Any) -> PrfaasError:
        fields = dict(error.trailing_metadata() or ())
        reason, message = fields.get(REASON_KEY), error.details() or ""
        if reason == "not_writer":
            return FencedError(message, writer=str(fields.get(WRITER_KEY, "")))
        if reason:
            return IndexRefusal(str(reason), message)
        hint = connection_hint(message, address=self.address, tls=self._tls)
        text = f"manager {self.address}: {error.code().name.lower()} {message}{hint}"
        return ManagerUnreachable(text, was_connected=_NOT_OPENED not in message)

    async def close(self) -> None:
        for opened in (*self._retired, self._connection):
            await opened.channel.close()
        await cancel_tasks(self._closing)
