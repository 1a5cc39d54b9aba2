"""TLS of the wire: certificates that follow their files, encrypted streams, and explanations of what went wrong."""

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
from typing import Any, Literal

from prfaas import logs
from prfaas.config import setting
from prfaas.config_checks import GIVEN, check_together
from prfaas.errors import ConfigError

_log = logs.get("transport")
BATCH_BYTES = 256 << 10  # Encrypted or decrypted per system call. A connection keeps twice as much.
# AES-GCM keys serve 2^24.5 full records (RFC 8446 5.5), 388 GiB. Certificates are checked again with each connection.
MAX_BYTES, MAX_SECONDS = 320 << 30, 3600.0
RETIRES_RATIO = 0.8  # The sender retires a connection at this part of either limit, before the receiver must end it.
EngineTls = Literal["system", "deployment"]  # Authority of engines at https.
TLS_DOC = "Encryption between components: certificates of the deployment's authority."
TlsRefusal = Literal["tls_none", "tls_expired", "tls_revoked", "tls_untrusted", "tls_failed"]
_FAULTS: Mapping[TlsRefusal, str] = {
    "tls_none": "the peer does not use TLS",
    "tls_expired": "the peer's certificate has expired",
    "tls_revoked": "the peer's certificate is revoked",
    "tls_untrusted": "the peer has no certificate of this deployment's authority",
    "tls_failed": "TLS failed",
}
_OUR_FAULTS = {  # Alerts of RFC 8446 6.2, as OpenSSL names them.
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it is revoked",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer trusts another authority",
    "TLSV1_ALERT_DECRYPT_ERROR": "the peer trusts another authority",
}


@dataclass(frozen=True)
class CertificateFiles:
    """PEM files of one process: authority, certificate, key, and the authority's revocation list.

    Without an authority, a listener requires no certificate and a dialler trusts nobody.
    """

    authority: Path | None
    certificate: Path
    key: Path
    revocations: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        paths = (self.authority, self.certificate, self.key, self.revocations)
        return tuple(path for path in paths if path is not None)


@dataclass(frozen=True)
class TlsConfig:
    """Setting by which a component names its PEM files."""

    authority: Path | None = setting(
        "path",
        default=None,
        only_where={"certificate": GIVEN},
        doc="PEM file: authority that must have signed the other side's certificate.",
    )
    certificate: Path | None = setting("path", default=None, doc="PEM file: own certificate.")
    key: Path | None = setting("path", default=None, doc="PEM file: private key of `certificate`.")
    revocations: Path | None = setting(
        "path", default=None, only_where={"authority": GIVEN}, doc="PEM file: the authority's revocation list."
    )

    def __post_init__(self) -> None:
        check_together(self, "certificate", "key")

    def files(self) -> CertificateFiles | None:
        """Return the files, or None if none are named."""
        if self.certificate is None or self.key is None:
            return None
        return CertificateFiles(self.authority, self.certificate, self.key, self.revocations)


class Certificates:
    """TLS contexts of one process, which follow changes of the files. Any thread may use it."""

    def __init__(
        self, files: CertificateFiles, *, alpn_protocols: Sequence[str] = (), serves_seconds: float = MAX_SECONDS
    ) -> None:
        """`alpn_protocols` are the protocols that a listener offers (ALPN); a stream may serve for `serves_seconds`.

        Raises:
            ConfigError: the files cannot be used.
        """
        self._files, self._alpn_protocols, self._serves_seconds = files, alpn_protocols, serves_seconds
        self._lock = threading.Lock()
        self._shared_context: ssl.SSLContext | None = None
        self._changed_at = self._warned_at = self._changes()
        try:
            self._contexts = self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls: {', '.join(map(str, files.paths))} cannot be used: {error}") from error

    @classmethod
    def of(cls, config: TlsConfig, *, alpn_protocols: Sequence[str] = ()) -> Certificates | None:
        """Return the certificates that a component's settings name, or None for plain text. Raises as the constructor."""
        files = config.files()
        return None if files is None else cls(files, alpn_protocols=alpn_protocols)

    def wrap(self, sock: socket.socket, *, is_listener: bool) -> TlsStream:
        """Return a stream over `sock`, whose handshake is still to do."""
        context = self.server_context() if is_listener else self.client_context()
        return TlsStream(sock, context, is_listener=is_listener, serves_seconds=self._serves_seconds)

    def client_context(self) -> ssl.SSLContext:
        """Return a client's context from the current files."""
        with self._lock:
            self._reload()
            return self._contexts[0]

    def server_context(self) -> ssl.SSLContext:
        """Return a server's context from the current files."""
        with self._lock:
            self._reload()
            return self._contexts[1]

    def shared_client_context(self) -> ssl.SSLContext:
        """Return one client context for all calls. It takes up changed files whenever a method of this object is called."""
        with self._lock:
            if self._shared_context is None:
                self._shared_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                configure_context(self._files, self._shared_context)
            self._reload()
            return self._shared_context

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        client_context, server_context = make_contexts(self._files)
        if self._alpn_protocols:
            server_context.set_alpn_protocols(list(self._alpn_protocols))
        return client_context, server_context

    def _changes(self) -> tuple[int, ...]:
        with contextlib.suppress(OSError):
            return tuple(path.stat().st_mtime_ns for path in self._files.paths)
        return ()

    def _reload(self) -> None:
        """Load changed files. Files that cannot be used, as in the middle of a change, have no effect."""
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
            if changed_at != self._warned_at:  # Each state of the files is logged once.
                self._warned_at = changed_at
                files = ", ".join(map(str, self._files.paths))
                _log.warning("tls.reload_failed", files=files, error=str(error))


def make_contexts(files: CertificateFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a client's and a server's context. Raises OSError or SSLError when the files cannot be used."""
    client_context, server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    configure_context(files, client_context)
    configure_context(files, server_context)
    return client_context, server_context


def configure_context(files: CertificateFiles, context: ssl.SSLContext) -> None:
    """Make a context present our certificate and accept only those of our authority. Raises as `make_contexts`."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # The handshake of the wire compares agents' names.
    context.load_cert_chain(files.certificate, files.key)
    if files.authority is None:
        return
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.authority)
    if files.revocations is not None:
        context.load_verify_locations(files.revocations)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


class TlsStream:
    """Encrypted bytes over a blocking socket. One thread may send while another receives."""

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
        # Random, so that not all connections of a link retire at once.
        self._retires_at = self._ends_at - serves_seconds * random.uniform(1 - RETIRES_RATIO, 0.5)

    @property
    def is_worn(self) -> bool:
        """Return whether this side, if it sends, should use another connection."""
        return self._sent_bytes > RETIRES_RATIO * MAX_BYTES or time.monotonic() > self._retires_at

    @property
    def is_worn_out(self) -> bool:
        """Return whether the sending peer should have retired the stream by now."""
        return self._received_bytes > MAX_BYTES or time.monotonic() > self._ends_at

    def handshake(self, *, within_seconds: float) -> str:
        """Return the name in the peer's certificate.

        Raises:
            OSError: the peer does not use TLS 1.3, has no valid certificate, or takes too long.
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
                self._flush(deadline)  # Sends the alert, which tells the peer why.
                raise

    def send(self, buffers: Sequence[bytes | memoryview], *, within_seconds: float) -> None:
        """Send all buffers."""
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
        self._sent_bytes += sum(map(len, buffers))

    def receive(self, views: Sequence[memoryview], *, within_seconds: float) -> None:
        """Fill all views."""
        deadline = time.monotonic() + within_seconds
        for view in views:
            at = 0
            while at < len(view):
                got = self._decrypt(view[at:])
                at += got
                if not got:
                    self._pull(deadline)
        self._received_bytes += sum(map(len, views))

    def has_input(self) -> bool:
        """Return whether bytes of the peer are buffered here."""
        with self._lock:
            return self._incoming.pending > 0 or self._ssl.pending() > 0

    def _decrypt(self, view: memoryview) -> int:
        """Decrypt into a view and return the number of bytes; 0 if more must arrive first."""
        with self._lock:
            try:
                got: int = self._ssl.read(len(view), view)  # type: ignore[assignment]
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
    """Return why a handshake failed, as a metric label."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reasons: dict[int, TlsRefusal] = {10: "tls_expired", 23: "tls_revoked"}
        return reasons.get(error.verify_code, "tls_untrusted")
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE"):
        return "tls_none"
    return "tls_untrusted" if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE" else "tls_failed"


def describe_error(error: Exception) -> str:
    """Return the message of a connection error; for TLS it says first whose certificate is at fault."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    fault = _OUR_FAULTS.get(error.reason or "")
    return f"the peer refuses our certificate: {fault}" if fault else f"{_FAULTS[refusal_reason(error)]}: {error}"


def common_name(certificate: Mapping[str, Any] | None) -> str:
    """Return the common name in a certificate of `getpeercert`, or an empty string."""
    subject = (pair for pairs in (certificate or {}).get("subject", ()) for pair in pairs)
    return next((value for kind, value in subject if kind == "commonName"), "")


CERTIFICATE_FAULTS: dict[int, str] = {  # By X509_V_ERR_*.
    9: "it is not valid yet",
    10: "it has expired",
    12: "the revocation list has expired",
    23: "its authority has revoked it",
}


def certificate_shown(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> dict[str, object]:
    """Return the certificate as a peer of the same authority sees it, by a handshake in memory.

    Raises:
        SSLCertVerificationError: such a peer would refuse it.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):  # TLS 1.3 needs two turns of each side.
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return dict(client.getpeercert() or {})


def describe_certificate(files: CertificateFiles) -> str:
    """Return what is wrong with a certificate, or what it is and what may be wrong elsewhere, and how to look at it."""
    look = f"openssl x509 -noout -subject -issuer -enddate -in {files.certificate}"
    try:
        certificate = certificate_shown(*make_contexts(files))
    except ssl.SSLCertVerificationError as error:
        unsigned = f"{files.authority} has not signed it ({error.verify_message})"
        return f"{files.certificate}: {CERTIFICATE_FAULTS.get(error.verify_code, unsigned)}; {look}"
    except OSError as error:
        return f"{', '.join(map(str, files.paths))} cannot be used: {error.strerror or error}"
    is_good = f"signed by {files.authority} and good until {certificate.get('notAfter')}"
    may_be_revoked = "" if files.revocations else "be revoked, or "
    elsewhere = f"it may {may_be_revoked}not be of the authority that the other side trusts"
    return f"{files.certificate}: for {common_name(certificate)}, {is_good}; {elsewhere}; {look}"
