"""Reads the JSON pages of managers and routers over HTTP, each with a deadline."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from prfaas.errors import PageUnreachable
from prfaas.transport.net.tls import CertificateFiles, TlsSettings

MAX_PAGE_BYTES = 64 << 20  # the state of thousands of nodes has a few MB
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")  # as OpenSSL calls an answer that is no TLS


def tls_of(settings: TlsSettings) -> ssl.SSLContext | None:
    """How pages at https:// are asked for; None where no certificates are named. Raises OSError, with the file's name where one
    cannot be read, and SSLError."""
    files = CertificateFiles.of(settings)
    if files is None:
        return None
    for path in files.paths:
        path.read_bytes()
    context = ssl.create_default_context(cafile=str(files.authority))
    context.load_cert_chain(files.certificate, files.key)
    if files.revocations is not None:
        context.load_verify_locations(files.revocations)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


def read_json(url: str, *, timeout_seconds: float, tls: ssl.SSLContext | None = None, key: str = "") -> Any:
    """What a page says; None when it says that there is no such thing (404).

    Raises:
        PageUnreachable: nobody answers there in time, or the answer is no JSON.
    """
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_seconds, context=tls) as response:
            return json.loads(response.read(MAX_PAGE_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.HTTPStatus.NOT_FOUND:
                return None
            why = (
                "; it asks for an operator's key: router_key_file" if error.code == http.HTTPStatus.UNAUTHORIZED else ""
            )
            raise PageUnreachable(f"{url}: HTTP status {error.code}{why}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PageUnreachable(f"{url}: {_why(error, url)}", is_refusal=_is_refusal(error, url)) from error


def _why(error: Exception, url: str) -> str:
    """What went wrong, and of what TLS leaves unsaid what it most likely means."""
    cause = _cause(error)
    if isinstance(cause, ssl.SSLError) and cause.reason in _PLAIN:
        return f"{cause}; it answers in plain text, as on loopback and with insecure_plaintext: write http://"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"{cause}; this side refuses its certificate: tls_authority must have signed it, for this host"
    if url.startswith("http:") and _has_hung_up(cause):
        return f"{cause}; it may ask for TLS: write https:// and set tls_authority, tls_certificate and tls_key"
    if isinstance(cause, http.client.BadStatusLine) and not _has_hung_up(cause):
        return "it answers, but not as a page does: pages are at http_listen or status_listen, not at listen"
    if _is_refusal(error, url):
        return f"{cause}; most likely it refuses the certificate: expired, revoked, of another authority, or none"
    return str(getattr(error, "reason", error))


def _is_refusal(error: Exception, url: str) -> bool:
    cause = _cause(error)
    is_alert = isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or "")
    return url.startswith("https:") and (_has_hung_up(cause) or is_alert)


def _has_hung_up(cause: Exception) -> bool:
    return isinstance(cause, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)  # RemoteDisconnected too


def _cause(error: Exception) -> Exception:
    reason = getattr(error, "reason", error)
    return reason if isinstance(reason, Exception) else error


def readiness(base: str, *, timeout_seconds: float, tls: ssl.SSLContext | None) -> str:
    """ "ready" where a manager answers so at its /readyz; why not elsewhere."""
    try:
        with urllib.request.urlopen(base.rstrip("/") + "/readyz", timeout=timeout_seconds, context=tls):
            return "ready"
    except urllib.error.HTTPError as error:
        with error:
            return f"not ready: HTTP status {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {_why(error, base)}"


def first_json(
    bases: Sequence[str], path: str, *, timeout_seconds: float, tls: ssl.SSLContext | None = None, key: str = ""
) -> Any:
    """Return a page of the first server of several that answers and knows of it; None when those that answer do not.

    Raises:
        PageUnreachable: none answers; the message has each one's reason.
    """
    failures: list[PageUnreachable] = []
    for base in bases:
        try:
            found = read_json(base.rstrip("/") + path, timeout_seconds=timeout_seconds, tls=tls, key=key)
        except PageUnreachable as error:
            failures.append(error)
            continue
        if found is not None:
            return found
    if bases and len(failures) == len(bases):
        is_refusal = any(failure.is_refusal for failure in failures)
        raise PageUnreachable("; ".join(map(str, failures)), is_refusal=is_refusal)
    return None
