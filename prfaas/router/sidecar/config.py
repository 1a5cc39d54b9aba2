"""Every setting of `prfaas-sidecar`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prfaas.config import setting
from prfaas.units import choice

Protocol = Literal["nixl", "prfaas"]
PrefillFailure = Literal["local", "fail"]


@dataclass(frozen=True)
class SidecarConfig:
    """One sidecar, beside one decode engine."""

    listen: str = setting("address", default="127.0.0.1:8000", doc="Where the gateway connects.")
    status_listen: str = setting(
        "address",
        default="127.0.0.1:8011",
        doc="HTTP: the sidecar's own /metrics and /healthz; `listen` has the engine's.",
    )
    engine_url: str = setting("text", default="http://127.0.0.1:8200", doc="Base URL of the decode engine beside it.")
    protocol: Protocol = setting(
        choice("nixl", "prfaas"),
        default="nixl",
        doc="How both engines hand over: nixl (prefill first, its kv_transfer_params go to decode) or prfaas (both at once, "
        "under the grant in x-prfaas-grant).",
    )
    prefill_hosts: tuple[str, ...] = setting(
        "text_list",
        default=(),
        doc="Hosts that x-prefiller-host-port may name: names, addresses, networks such as 10.0.0.0/8; when empty, "
        "addresses of private networks and of this machine.",
    )
    prefill_sampling: bool = setting(
        "flag", default=False, doc="Of several hosts in the header take one at random; otherwise the first."
    )
    prefill_timeout: float = setting("seconds", default=120.0, doc="When a prefill that has not ended has failed.")
    prefill_retries: int = setting(
        "count", default=0, doc="How often a prefill that was answered with 502, 503 or 504 is tried again."
    )
    prefill_failure: PrefillFailure = setting(
        choice("local", "fail"),
        default="local",
        doc="What follows a failed prefill: the decode engine does it all (local), or the client gets the error (fail).",
    )
    request_timeout: float = setting("seconds", default=600.0, doc="When an answer that has not ended is given up.")
    max_body_bytes: int = setting("bytes", default=32 << 20, doc="Largest request body.")

    def __post_init__(self) -> None:
        if not self.engine_url.startswith(("http://", "https://")):
            raise ValueError(f"engine_url: {self.engine_url!r}; write http://host:port")
