"""Every setting of `prfaas-sidecar`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prfaas.config import setting
from prfaas.config_checks import GIVEN, check_apart, check_consent, check_engine_tls, check_together, check_url
from prfaas.transport.net.tls import Certificates, EngineTls
from prfaas.units import choice

Protocol = Literal["nixl", "prfaas"]
PrefillFailure = Literal["local", "fail"]
PrefillScheme = Literal["http", "https"]


@dataclass(frozen=True)
class SidecarConfig:
    """One sidecar, beside one decode engine."""

    listen: str = setting("address", default="127.0.0.1:8000", doc="Where the gateway connects.")
    status_listen: str = setting(
        "address",
        default="127.0.0.1:8011",
        doc="HTTP: the sidecar's own /metrics and /healthz; `listen` has the engine's.",
    )
    insecure_plaintext: bool = setting(
        "flag", default=False, doc="Listen beyond loopback without certificates, and so to everybody."
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
        "addresses of private networks and of this machine, but for link-local ones (169.254.0.0/16).",
    )
    prefill_scheme: PrefillScheme = setting(
        choice("http", "https"), default="http", doc="How prefill engines are asked, which the header does not say."
    )
    prefill_sampling: bool = setting(
        "flag", default=False, doc="Of several hosts in the header take one at random; otherwise the first."
    )
    prefill_timeout: float = setting("seconds", default=120.0, doc="When a prefill that has not ended has failed.")
    prefill_retries: int = setting(
        "count",
        default=0,
        only_where={"protocol": "nixl"},
        doc="How often a prefill that was answered with 502, 503 or 504 is tried again.",
    )
    prefill_failure: PrefillFailure = setting(
        choice("local", "fail"),
        default="local",
        doc="What follows a failed prefill: the decode engine does it all (local), or the client gets the error (fail).",
    )
    request_timeout: float = setting("seconds", default=600.0, doc="When an answer that has not ended is given up.")
    max_body_bytes: int = setting("bytes", default=32 << 20, doc="Largest request body.")
    tls_authority: Path | None = setting(
        "path", default=None, doc="PEM file: who signed the deployment's certificates."
    )
    tls_certificate: Path | None = setting("path", default=None, doc="PEM file: this sidecar's certificate.")
    tls_key: Path | None = setting("path", default=None, doc="PEM file: its private key.")
    tls_revocations: Path | None = setting(
        "path",
        default=None,
        only_where={"tls_authority": GIVEN},
        doc="PEM file: the authority's revocation list; whom it names is refused.",
    )
    engine_tls: EngineTls = setting(
        choice("system", "deployment"),
        default="system",
        doc="Who vouches for engines that are asked at https: the system's authorities, or tls_authority; to engines of the "
        "deployment the sidecar shows tls_certificate.",
    )

    def __post_init__(self) -> None:
        check_together(self, "tls_authority", "tls_certificate", "tls_key")
        check_consent(self, "listen", "status_listen")
        check_engine_tls(self)
        check_apart(self, "listen", "status_listen")
        check_url("engine_url", self.engine_url)

    def certificates(self, *, speaks: tuple[str, ...]) -> Certificates | None:
        """What peers are shown and asked for; None: plain text. Raises ConfigError when they cannot be used."""
        return Certificates.of(self, speaks=speaks)
