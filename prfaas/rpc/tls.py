"""What the end of a connection to a manager most likely means where certificates decide: gRPC does not say."""

from __future__ import annotations

import functools
import time

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
