"""HTTP client for the JSON pages of managers, routers and agents."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from prfaas.errors import PageUnreachable
from prfaas.transport.net.tls import TlsConfig

MAX_PAGE_BYTES = 64 << 20  # The state of thousands of nodes has a few MB.
# OpenSSL's reasons for an answer that is not TLS.
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")


def tls_of(config: TlsConfig) -> ssl.SSLContext | None:
    """Return the TLS context for https pages, or None without certificates.

    Raises:
        OSError: a file cannot be read or used.
    """
    files = config.files()
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


def read_json(
    url: str,
    *,
    timeout_seconds: float,
    tls: ssl.SSLContext | None = None,
    key: str = "",
    may_be_unavailable: bool = False,
) -> Any:
    """Return the JSON of a page, or None for status 404. A health page may have status 503.

    Raises:
        PageUnreachable: no answer in time, or the answer is not JSON.
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
            if may_be_unavailable and error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:
                return json.loads(error.read(MAX_PAGE_BYTES))
            why = (
                "; an operator's key is required: router_key_file" if error.code == http.HTTPStatus.UNAUTHORIZED else ""
            )
            raise PageUnreachable(f"{url}: HTTP status {error.code}{why}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PageUnreachable(f"{url}: {_why(error, url)}", is_refusal=_is_refusal(error, url)) from error


def _why(error: Exception, url: str) -> str:
    """Return the cause of an error, with the likely meaning of vague TLS errors."""
    cause = _cause(error)
    if isinstance(cause, ssl.SSLError) and cause.reason in _PLAIN:
        return f"{cause}; the server answers in plain text: write http://"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"{cause}; the server's certificate is not trusted: tls.authority must have signed it for this host"
    if url.startswith("http:") and _has_hung_up(cause):
        return f"{cause}; the server may require TLS: write https:// and set tls with authority, certificate and key"
    if isinstance(cause, http.client.BadStatusLine) and not _has_hung_up(cause):
        return "the answer is not HTTP: pages are at http_listen or status_listen, not at listen"
    if _is_refusal(error, url):
        return (
            f"{cause}; the server probably rejects the certificate: expired, revoked, of another authority, or missing"
        )
    return str(getattr(error, "reason", error))


def _is_refusal(error: Exception, url: str) -> bool:
    cause = _cause(error)
    is_alert = isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or "")
    return url.startswith("https:") and (_has_hung_up(cause) or is_alert)


def _has_hung_up(cause: Exception) -> bool:
    return isinstance(cause, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)  # Includes RemoteDisconnected.


def _cause(error: Exception) -> Exception:
    reason = getattr(error, "reason", error)
    return reason if isinstance(reason, Exception) else error


def readiness(base: str, *, timeout_seconds: float, tls: ssl.SSLContext | None) -> str:
    """Return "ready" if a manager's /readyz says so, else the reason."""
    try:
        with urllib.request.urlopen(base.rstrip("/") + "/readyz", timeout=timeout_seconds, context=tls):
            return "ready"
    except urllib.error.HTTPError as error:
        with error:
            return f"not ready: HTTP status {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {_why(error, base)}"


def first_json(bases: Sequence[str], path: str, *, timeout_seconds: float, tls: ssl.SSLContext | None = None) -> Any:
    """Return a page from the first server that has it, or None if no answering server has it.

    Raises:
        PageUnreachable: no server answers. The message has each reason.
    """
    failures: list[PageUnreachable] = []
    for base in bases:
        try:
            found = read_json(base.rstrip("/") + path, timeout_seconds=timeout_seconds, tls=tls)
        except PageUnreachable as error:
            failures.append(error)
            continue
        if found is not None:
            return found
    if bases and len(failures) == len(bases):
        is_refusal = any(failure.is_refusal for failure in failures)
        raise PageUnreachable("; ".join(map(str, failures)), is_refusal=is_refusal)
    return None
