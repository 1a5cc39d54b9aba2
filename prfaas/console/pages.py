"""Reads the JSON pages of managers and routers over HTTP, each with a deadline."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prfaas.errors import PageUnreachable

MAX_PAGE_BYTES = 64 << 20  # the state of thousands of nodes has a few MB
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")  # as OpenSSL calls an answer that is no TLS


def tls_of(authority: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """How pages at https:// are asked for, from settings of which all are given or none. Raises OSError, with the file's name
    where one cannot be read, and SSLError."""
    if not (authority and certificate and key):
        return None
    for path in (authority, certificate, key):
        path.read_bytes()
    context = ssl.create_default_context(cafile=str(authority))
    context.load_cert_chain(certificate, key)
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
            raise PageUnreachable(f"{url}: HTTP status {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PageUnreachable(f"{url}: {_why(error, url)}") from error


def _why(error: Exception, url: str) -> str:
    """What went wrong, and of what TLS leaves unsaid what it most likely means."""
    reason = getattr(error, "reason", error)
    cause = reason if isinstance(reason, Exception) else error
    if isinstance(cause, ssl.SSLError) and cause.reason in _PLAIN:
        return f"{cause}; it answers in plain text, as on loopback and with insecure_plaintext: write http://"
    hung_up = isinstance(cause, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)  # RemoteDisconnected too
    is_alert = isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or "")
    if url.startswith("https:") and (hung_up or is_alert):
        return f"{cause}; most likely it refuses the certificate: expired, revoked, of another authority, or none"
    return str(reason)


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
    """A page of the first server of several that answers and knows of it; None when those that answer do not.

    Raises:
        PageUnreachable: none answers; the message has each one's reason.
    """
    failures: list[str] = []
    for base in bases:
        try:
            found = read_json(base.rstrip("/") + path, timeout_seconds=timeout_seconds, tls=tls, key=key)
        except PageUnreachable as error:
            failures.append(str(error))
            continue
        if found is not None:
            return found
    if bases and len(failures) == len(bases):
        raise PageUnreachable("; ".join(failures))
    return None
