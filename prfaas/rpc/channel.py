"""A connection to one manager, and its errors as ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from prfaas import tracing
from prfaas.errors import Fenced, IndexRefusal, ManagerUnreachable, PrfaasError
from prfaas.rpc.methods import client_calls
from prfaas.rpc.tokens import REASON_KEY, WRITER_KEY, credentials

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


@dataclass(frozen=True)
class Tls:
    """Files of mutual TLS, PEM."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.authority, self.certificate, self.key

    @classmethod
    def of(cls, authority: Path | None, certificate: Path | None, key: Path | None) -> Tls | None:
        """From settings, of which all are given or none."""
        return cls(authority, certificate, key) if authority and certificate and key else None


class Channel:
    """One manager's calls: `await channel.call("Match", request, timeout_seconds=...)`."""

    def __init__(self, address: str, *, name: str, secret: bytes, tls: Tls | None = None) -> None:
        self.address = address
        self.metadata = credentials(name, secret)
        self._tls = tls
        self._changed_at = self._changes()
        self._channel = self._open(address, tls)
        self._calls = client_calls(self._channel)
        self._former: list[Any] = []  # with older certificates; what was asked there ends there

    @staticmethod
    def _open(address: str, tls: Tls | None) -> Any:
        if tls is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        chain = (tls.authority.read_bytes(), tls.key.read_bytes(), tls.certificate.read_bytes())
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*chain), options=_OPTIONS)

    async def call(self, method: str, request: Any, *, timeout_seconds: float) -> Any:
        """The response.

        Raises:
            ManagerUnreachable: no answer in time.
            Fenced: another manager writes this cluster; ask there.
            IndexRefusal: the manager refuses the request; `reason` says why.
        """
        self._renew()
        with translated_errors(self.address):
            metadata = (*self.metadata, *tracing.headers().items())
            return await self._calls[method](request, timeout=timeout_seconds, metadata=metadata)

    def stream(self, method: str, *arguments: Any) -> Any:
        """The call object of a streaming method; use it within `translated_errors`."""
        self._renew()
        return self._calls[method](*arguments, metadata=self.metadata)

    def _renew(self) -> None:
        """Show new certificates once the files have changed; files in the middle of a change leave things as they are."""
        changed_at = self._changes()
        if changed_at == self._changed_at:
            return
        with contextlib.suppress(OSError):
            renewed = self._open(self.address, self._tls)
            self._former.append(self._channel)
            self._channel, self._calls, self._changed_at = renewed, client_calls(renewed), changed_at

    def _changes(self) -> tuple[int, ...]:
        if self._tls is None:
            return ()
        with contextlib.suppress(OSError):
            return tuple(path.stat().st_mtime_ns for path in self._tls.paths)
        return ()

    async def close(self) -> None:
        for channel in (*self._former, self._channel):
            await channel.close()


@contextmanager
def translated_errors(address: str) -> Iterator[None]:
    """gRPC's errors as ours."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _ours(error, address) from error


def _ours(error: Any, address: str) -> PrfaasError:
    fields = dict(error.trailing_metadata() or ())
    reason, message = fields.get(REASON_KEY), error.details() or ""
    if reason == "not_writer":
        return Fenced(message, writer=str(fields.get(WRITER_KEY, "")))
    if reason:
        return IndexRefusal(str(reason), message)
    return ManagerUnreachable(f"manager {address}: {error.code().name.lower()} {message}")
