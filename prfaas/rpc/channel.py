"""What the end of a connection to a manager most likely means where certificates decide: gRPC does not say."""

from __future__ import annotations

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
from prfaas.errors import Fenced, IndexRefusal, ManagerUnreachable, PrfaasError
from prfaas.rpc.methods import client_calls
from prfaas.rpc.tasks import cancel_tasks
from prfaas.rpc.tokens import REASON_KEY, WRITER_KEY, credentials
from prfaas.transport.net.tls import CertificateFiles, describe_certificate

_PLAIN = "WRONG_VERSION_NUMBER"
_REFUSED_HERE = ("handshake failed", "Hostname Verification Check failed")
_HUNG_UP = ("Socket closed", "Connection reset", "Broken pipe")
_NOT_OPENED = "last error: "  # of a connection that was to be opened; one that had been open has other ends
_JUDGED_SECONDS = 10.0  # a judgement is a handshake, a millisecond of computing, and a router may fail a thousand calls


def connection_hint(details: str, *, address: str, tls: CertificateFiles | None) -> str:
    """What follows gRPC's own words; "" where these say enough."""
    if _NOT_OPENED in details and any(word in details for word in _HUNG_UP):
        if tls is None:
            return "; it hung up: where it asks for certificates, set tls_authority, tls_certificate and tls_key"
        judged = _judged(tls, int(time.time() / _JUDGED_SECONDS))
        return f"; it hung up, as managers do that stop, or refuse a certificate; {judged}"
    if tls is not None and _PLAIN in details:
        return "; it answers in plain text: give it certificates, or leave tls_* out here"
    if tls is not None and any(word in details for word in _REFUSED_HERE):
        wanted = f"it must be valid, for {address.rpartition(':')[0]} and signed by {tls.authority}"
        look = f"openssl s_client -connect {address} -CAfile {tls.authority} -verify_return_error"
        return f"; this side refuses the manager's certificate: {wanted}; {look}"
    return ""


@functools.lru_cache(maxsize=8)
def _judged(tls: CertificateFiles, moment: int) -> str:
    """The judgement of this moment."""
    return describe_certificate(tls)


os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its library writes lines of its own beside the errors that it raises


MAX_MESSAGE_BYTES = 16 << 20  # a prompt of a million tokens has 1 MiB of unit hashes
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
class _Opened:
    """One connection, with the certificates of one moment."""

    channel: Any
    calls: Any
    num_running: int = 0


class Channel:
    """One manager's calls: `await channel.call("Match", request, timeout_seconds=...)`."""

    def __init__(self, address: str, *, name: str, secret: bytes, tls: CertificateFiles | None = None) -> None:
        """Raises:
        ManagerUnreachable: a certificate's file cannot be read.
        """
        self.address = address
        self.metadata = credentials(name, secret)
        self._tls = tls
        self._changed_at = self._changes()
        try:
            self._opened = self._open(address, tls)
        except OSError as error:
            raise ManagerUnreachable(f"manager {address}: {error}") from error
        self._former: set[_Opened] = set()  # with older certificates; what was asked there ends there
        self._closing: set[asyncio.Task[None]] = set()

    @staticmethod
    def _open(address: str, tls: CertificateFiles | None) -> _Opened:
        if tls is None:
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            assert tls.authority is not None, "or it would trust nobody"
            chain = (tls.authority.read_bytes(), tls.key.read_bytes(), tls.certificate.read_bytes())
            channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*chain), options=_OPTIONS)
        return _Opened(channel, client_calls(channel))

    @property
    def connection(self) -> object:
        """What calls use from now on: another one once the certificates have changed."""
        self._renew()
        return self._opened

    async def call(self, method: str, request: Any, *, timeout_seconds: float) -> Any:
        """The response.

        Raises:
            ManagerUnreachable: no answer in time.
            Fenced: another manager writes this cluster; ask there.
            IndexRefusal: the manager refuses the request; `reason` says why.
        """
        with self.translated_errors():
            metadata = (*self.metadata, *tracing.headers().items())
            return await self._begin(method, request, timeout=timeout_seconds, metadata=metadata)

    def stream(self, method: str, *arguments: Any) -> Any:
        """The call object of a streaming method; use it within `translated_errors`."""
        return self._begin(method, *arguments, metadata=self.metadata)

    def _begin(self, method: str, *arguments: Any, **options: Any) -> Any:
        self._renew()
        opened = self._opened
        call = opened.calls[method](*arguments, **options)
        opened.num_running += 1
        call.add_done_callback(functools.partial(self._note_end, opened))
        return call

    def _note_end(self, opened: _Opened, _call: Any) -> None:
        opened.num_running -= 1
        with contextlib.suppress(RuntimeError):  # a call that was forgotten and outlived its event loop
            self._close_if_done(opened)

    def _close_if_done(self, opened: _Opened) -> None:
        """A former connection goes with its last call: kept alive, it would show its certificate for ever."""
        if opened.num_running or opened not in self._former:
            return
        self._former.discard(opened)
        task = asyncio.get_running_loop().create_task(opened.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _renew(self) -> None:
        """Show new certificates once the files have changed; files in the middle of a change leave things as they are."""
        changed_at = self._changes()
        if changed_at == self._changed_at:
            return
        with contextlib.suppress(OSError):
            renewed = self._open(self.address, self._tls)
            former, self._opened, self._changed_at = self._opened, renewed, changed_at
            self._former.add(former)
            self._close_if_done(former)

    def _changes(self) -> tuple[int, ...]:
        if self._tls is None:
            return ()
        with contextlib.suppress(OSError):
            return tuple(path.stat().st_mtime_ns for path in self._tls.paths)
        return ()

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """gRPC's errors as ours."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._ours(error) from error

    def _ours(self, error: Any) -> PrfaasError:
        fields = dict(error.trailing_metadata() or ())
        reason, message = fields.get(REASON_KEY), error.details() or ""
        if reason == "not_writer":
            return Fenced(message, writer=str(fields.get(WRITER_KEY, "")))
        if reason:
            return IndexRefusal(str(reason), message)
        meant = connection_hint(message, address=self.address, tls=self._tls)
        return ManagerUnreachable(f"manager {self.address}: {error.code().name.lower()} {message}{meant}")

    async def close(self) -> None:
        for opened in (*self._former, self._opened):
            await opened.channel.close()
        await cancel_tasks(self._closing)
