"""A certificate as peers of the same authority see it: a TLS handshake with itself, in memory."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from prfaas import logs
from prfaas.errors import ConfigError

FAULTS: dict[int, str] = {  # by X509_V_ERR_*
    9: "it is not valid yet",
    10: "it has expired",
    12: "the revocation list has expired",
    23: "its authority has revoked it",
}


def certificate_shown(dialling: ssl.SSLContext, listening: ssl.SSLContext) -> dict[str, object]:
    """The certificate as a peer gets it. Raises SSLCertVerificationError when the peer would not take it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = dialling.wrap_bio(to_client, to_server)
    server = listening.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):  # TLS 1.3 needs two turns of each side
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return dict(client.getpeercert() or {})


def describe_certificate(files: CertificateFiles) -> str:
    """What is wrong with a certificate, or for whom it is and what can only be wrong elsewhere; and how to look at it."""
    look = f"openssl x509 -noout -subject -issuer -enddate -in {files.certificate}"
    try:
        its = certificate_shown(*make_contexts(files))
    except ssl.SSLCertVerificationError as error:
        unsigned = f"{files.authority} has not signed it ({error.verify_message})"
        return f"{files.certificate}: {FAULTS.get(error.verify_code, unsigned)}; {look}"
    except OSError as error:
        return f"{', '.join(map(str, files.paths))} cannot be used: {error.strerror or error}"
    known = "" if files.revocations else "be revoked, or "
    elsewhere = f"it may {known}not be of the authority that the other side trusts"
    is_good = f"signed by {files.authority} and good until {its.get('notAfter')}"
    return f"{files.certificate}: for {common_name(its)}, {is_good}; {elsewhere}; {look}"


_log = logs.get("transport")
BATCH_BYTES = 256 << 10  # encrypted or decrypted per system call; what a connection keeps besides, twice
# AES-GCM keys serve 2^24.5 full records (RFC 8446 5.5), 388 GiB; certificates are looked at again with the next connection.
MAX_BYTES, MAX_SECONDS = 320 << 30, 3600.0
RETIRES_RATIO = 0.8  # of either: whoever sends retires a connection by then, so that the other side need not end it
_EXPIRED, _REVOKED = 10, 23  # X509_V_ERR_*
EngineTls = Literal["system", "deployment"]  # who vouches for engines at https
TlsRefusal = Literal["tls_none", "tls_expired", "tls_revoked", "tls_untrusted", "tls_failed"]
_FAULTS: Mapping[TlsRefusal, str] = {
    "tls_none": "the peer speaks no TLS",
    "tls_expired": "the peer's certificate has expired",
    "tls_revoked": "the peer's certificate is revoked",
    "tls_untrusted": "the peer shows no certificate that counts here",
    "tls_failed": "TLS failed",
}
_REFUSES_OURS = {  # the alerts of RFC 8446 6.2 as OpenSSL calls them
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it is revoked",
    "TLSV1_ALERT_UNKNOWN_CA": "it is not of the peer's authority",
    "TLSV1_ALERT_DECRYPT_ERROR": "it is not of the peer's authority",
}


@dataclass(frozen=True)
class CertificateFiles:
    """PEM files of one process. `revocations`: the authority's revocation list. Without an authority a listener asks nobody
    for a certificate, and who dials trusts nobody."""

    authority: Path | None
    certificate: Path
    key: Path
    revocations: Path | None = None

    @classmethod
    def of(cls, settings: TlsSettings) -> CertificateFiles | None:
        """What a component's settings name, all of them or none."""
        its = settings
        if not (its.tls_authority and its.tls_certificate and its.tls_key):
            return None
        return cls(its.tls_authority, its.tls_certificate, its.tls_key, its.tls_revocations)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(its for its in (self.authority, self.certificate, self.key, self.revocations) if its is not None)


class TlsSettings(Protocol):
    """The four settings by which every component names its files."""

    @property
    def tls_authority(self) -> Path | None: ...
    @property
    def tls_certificate(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def tls_revocations(self) -> Path | None: ...


class Certificates:
    """Contexts made from the files, anew when these change. Any thread may ask."""

    def __init__(
        self, files: CertificateFiles, *, speaks: Sequence[str] = (), serves_seconds: float = MAX_SECONDS
    ) -> None:
        """`speaks`: the protocols inside that a listener offers (ALPN); `serves_seconds`: how long a stream may.

        Raises:
            ConfigError: the files cannot be used.
        """
        self._files, self._speaks, self._serves_seconds = files, speaks, serves_seconds
        self._lock = threading.Lock()
        self._shared_context: ssl.SSLContext | None = None
        self._changed_at = self._warned_at = self._changes()
        try:
            self._contexts = self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls: {', '.join(map(str, files.paths))} cannot be used: {error}") from error

    @classmethod
    def of(cls, settings: TlsSettings, *, speaks: Sequence[str] = ()) -> Certificates | None:
        """What a component's settings name; None where they name none: it speaks plain text. Raises ConfigError as above."""
        files = CertificateFiles.of(settings)
        return None if files is None else cls(files, speaks=speaks)

    def wrap(self, sock: socket.socket, *, is_listener: bool) -> TlsStream:
        """A stream over `sock`; its handshake is still to be done."""
        with self._lock:
            self._reload()
            context = self._contexts[is_listener]
            return TlsStream(sock, context, is_listener=is_listener, serves_seconds=self._serves_seconds)

    def client_context(self) -> ssl.SSLContext:
        """The dialling side's context, from the files as they are."""
        with self._lock:
            self._reload()
            return self._contexts[0]

    def server_context(self) -> ssl.SSLContext:
        """The listening side's context, from the files as they are."""
        with self._lock:
            self._reload()
            return self._contexts[1]

    def shared_client_context(self) -> ssl.SSLContext:
        """A dialling side's context for who keeps one: it takes the files anew whenever one of these methods is called."""
        with self._lock:
            if self._shared_context is None:
                self._shared_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                configure_context(self._files, self._shared_context)
            self._reload()
            return self._shared_context

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        dialling, listening = make_contexts(self._files)
        if self._speaks:
            listening.set_alpn_protocols(list(self._speaks))
        return dialling, listening

    def _changes(self) -> tuple[int, ...]:
        with contextlib.suppress(OSError):
            return tuple(path.stat().st_mtime_ns for path in self._files.paths)
        return ()

    def _reload(self) -> None:
        """Files that cannot be used, as in the middle of a change, leave things as they are."""
        changed_at = self._changes()
        if changed_at == self._changed_at:
            return
        try:
            self._contexts = self._load()
            if self._shared_context is not None:
                configure_context(self._files, self._shared_context)
            self._changed_at = changed_at
            _log.info("tls.reloaded", certificate=str(self._files.certificate))
        except (OSError, ssl.SSLError) as error:
            if changed_at != self._warned_at:  # files that stay so are tried at each connection, and named once
                self._warned_at = changed_at
                files = ", ".join(map(str, self._files.paths))
                _log.warning("tls.not_reloaded", files=files, error=str(error))


def make_contexts(files: CertificateFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The dialling and the listening side's. Raises OSError or SSLError when the files cannot be used."""
    dialling, listening = (ssl.SSLContext(its) for its in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    configure_context(files, dialling)
    configure_context(files, listening)
    return dialling, listening


def configure_context(files: CertificateFiles, context: ssl.SSLContext) -> None:
    """Have a context show our certificate and take those of our authority alone. Raises as `contexts_of`."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # agents are known by name, wherever they are; see `handshake`
    context.load_cert_chain(files.certificate, files.key)
    if files.authority is None:
        return
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.authority)
    if files.revocations is not None:
        context.load_verify_locations(files.revocations)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


class TlsStream:
    """Bytes over a blocking socket, encrypted. One thread at a time sends, one receives."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, is_listener: bool, serves_seconds: float
    ) -> None:
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=is_listener)
        self._lock = threading.Lock()
        self._received = memoryview(bytearray(BATCH_BYTES))
        self._sent_bytes = self._received_bytes = 0
        self._ends_at = time.monotonic() + serves_seconds
        left = serves_seconds * random.uniform(1 - RETIRES_RATIO, 0.5)  # not all connections at once
        self._retires_at = self._ends_at - left

    @property
    def is_worn(self) -> bool:
        """Whether another connection should take over, if this side sends."""
        return self._sent_bytes > RETIRES_RATIO * MAX_BYTES or time.monotonic() > self._retires_at

    @property
    def is_worn_out(self) -> bool:
        """Whether the other side should have retired it: it must not go on."""
        return self._received_bytes > MAX_BYTES or time.monotonic() > self._ends_at

    def handshake(self, *, within_seconds: float) -> str:
        """Agree with the peer; returns the name that its certificate is for.

        Raises:
            OSError: the peer speaks no TLS 1.3, has no certificate that counts, or takes too long.
        """
        deadline = time.monotonic() + within_seconds
        while True:
            try:
                self._ssl.do_handshake()
                self._flush(deadline)
                return common_name(self._ssl.getpeercert())
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._pull(deadline)
            except ssl.SSLError:
                self._flush(deadline)  # which tells the peer why
                raise

    def send(self, buffers: Sequence[bytes | memoryview], *, within_seconds: float) -> int:
        """Send all of it; returns its length."""
        deadline, waiting = time.monotonic() + within_seconds, 0
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                with self._lock:
                    wrote = self._ssl.write(memoryview(buffer)[at : at + BATCH_BYTES])
                at += wrote
                waiting += wrote
                if waiting >= BATCH_BYTES:
                    self._flush(deadline)
                    waiting = 0
        self._flush(deadline)
        total = sum(map(len, buffers))
        self._sent_bytes += total
        return total

    def receive(self, views: Sequence[memoryview], *, within_seconds: float) -> int:
        """Fill `views`; returns their length."""
        deadline = time.monotonic() + within_seconds
        for view in views:
            at = 0
            while at < len(view):
                got = self._decrypt(view[at:])
                at += got
                if not got:
                    self._pull(deadline)
        total = sum(map(len, views))
        self._received_bytes += total
        return total

    def has_input(self) -> bool:
        """Whether bytes of the peer have been taken from the socket and not been asked for."""
        with self._lock:
            return self._incoming.pending > 0 or self._ssl.pending() > 0

    def _decrypt(self, view: memoryview) -> int:
        """How much was there; 0: more must come first."""
        with self._lock:
            try:
                got: int = self._ssl.read(len(view), view)  # type: ignore[assignment]  # into the buffer, it counts
            except ssl.SSLWantReadError:
                return 0
        if not got:
            raise ConnectionResetError("the peer closed the connection")
        return got

    def _pull(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("the peer sends too slowly")
        got = self._socket.recv_into(self._received)
        if not got:
            raise ConnectionResetError("the peer closed the connection")
        with self._lock:
            self._incoming.write(self._received[:got])

    def _flush(self, deadline: float) -> None:
        with self._lock:
            waiting = memoryview(self._outgoing.read())
        while waiting:
            if time.monotonic() > deadline:
                raise TimeoutError("the peer takes bytes too slowly")
            waiting = waiting[self._socket.send(waiting) :]


def refusal_reason(error: ssl.SSLError) -> TlsRefusal:
    """Why a handshake failed, as a word to count."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return {_EXPIRED: "tls_expired", _REVOKED: "tls_revoked"}.get(error.verify_code, "tls_untrusted")  # type: ignore[return-value]
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE"):
        return "tls_none"
    return "tls_untrusted" if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE" else "tls_failed"


def describe_error(error: Exception) -> str:
    """What an error of a connection says; of a TLS handshake first whose certificate is at fault, and how."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    ours = _REFUSES_OURS.get(error.reason or "")
    return f"the peer refuses our certificate, {ours}" if ours else f"{_FAULTS[refusal_reason(error)]}: {error}"


def common_name(certificate: Mapping[str, Any] | None) -> str:
    """The name that a peer's certificate is for, as `getpeercert` has it; "" for none."""
    subject = (pair for pairs in (certificate or {}).get("subject", ()) for pair in pairs)
    return next((value for kind, value in subject if kind == "commonName"), "")
