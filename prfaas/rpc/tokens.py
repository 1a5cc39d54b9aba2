"""Identity of callers: a name and its proof under the deployment's secret, as gRPC metadata.

Without TLS, anyone who can listen can repeat a token. Use mutual TLS outside private networks.
"""

import hashlib
import hmac
from collections.abc import Mapping
from functools import lru_cache

from prfaas.grants import derive_key

NAME_KEY = "prfaas-name"
TOKEN_KEY = "prfaas-token"
REASON_KEY = "prfaas-reason"
WRITER_KEY = "prfaas-writer"


def credentials(name: str, secret: bytes) -> tuple[tuple[str, str], ...]:
    """Return the metadata that `name` sends with every call."""
    return (NAME_KEY, name), (TOKEN_KEY, _token(name, secret))


@lru_cache(maxsize=1024)
def _token(name: str, secret: bytes) -> str:
    return hmac.digest(derive_key(secret, "rpc"), name.encode(), hashlib.sha256).hex()


def caller(metadata: Mapping[str, str | bytes], secret: bytes) -> str | None:
    """Return the name that the metadata proves, or None."""
    name, token = metadata.get(NAME_KEY), metadata.get(TOKEN_KEY)
    if not isinstance(name, str) or not isinstance(token, str):
        return None
    return name if hmac.compare_digest(token.encode(), _token(name, secret).encode()) else None
