"""A certificate as peers of the same authority see it: a TLS handshake with itself, in memory."""

from __future__ import annotations

import contextlib
import ssl

from prfaas.transport.tls import CertificateFiles, common_name, contexts_of

FAULTS: dict[int, str] = {  # by X509_V_ERR_*
    9: "it is not valid yet",
    10: "it has expired",
    12: "the revocation list has expired",
    23: "its authority has revoked it",
}


def seen(dialling: ssl.SSLContext, listening: ssl.SSLContext) -> dict[str, object]:
    """The certificate as a peer gets it. Raises SSLCertVerificationError when the peer would not take it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = dialling.wrap_bio(to_client, to_server)
    server = listening.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):  # TLS 1.3 needs two turns of each side
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return dict(client.getpeercert() or {})


def judgement(files: CertificateFiles) -> str:
    """What is wrong with a certificate, or for whom it is and what can only be wrong elsewhere; and how to look at it."""
    look = f"openssl x509 -noout -subject -issuer -enddate -in {files.certificate}"
    try:
        its = seen(*contexts_of(files))
    except ssl.SSLCertVerificationError as error:
        unsigned = f"{files.authority} has not signed it ({error.verify_message})"
        return f"{files.certificate}: {FAULTS.get(error.verify_code, unsigned)}; {look}"
    except OSError as error:
        return f"{', '.join(map(str, files.paths))} cannot be used: {error.strerror or error}"
    known = "" if files.revocations else "be revoked, or "
    elsewhere = f"it may {known}not be of the authority that the other side trusts"
    is_good = f"signed by {files.authority} and good until {its.get('notAfter')}"
    return f"{files.certificate}: for {common_name(its)}, {is_good}; {elsewhere}; {look}"
