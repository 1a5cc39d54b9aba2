"""Settings of `prfaas-sidecar`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from prfaas.config import setting
from prfaas.config_checks import GIVEN, check_apart, check_consent, check_engine_tls, check_together, check_url
from prfaas.transport.net.tls import Certificates, EngineTls
from prfaas.units import choice

Protocol = Literal["nixl", "prfaas"]
PrefillFailure = Literal["local", "fail"]
PrefillScheme = Literal["http", "https"]


@dataclass(frozen=True)
class SidecarConfig:
    """Settings of one sidecar, beside one decode engine."""

    REMOVED_SETTINGS: ClassVar[Mapping[str, str]] = {
        "prefill_timeout": "a prefill that has not ended after 120 s has failed",
        "request_timeout": "an answer that has not ended after 600 s has failed",
        "max_body_bytes": "a request body may have 32 MiB",
    }
    listen: str = setting("address", default="127.0.0.1:8000", doc="Address for the gateway.")
    status_listen: str = setting(
        "address",
        default="127.0.0.1:8011",
        doc="HTTP address of the sidecar's own /metrics and /healthz; `listen` has the engine's.",
    )
    insecure_plaintext: bool = setting(
        "flag", default=False, doc="Listen beyond loopback without certificates, so that anybody can connect."
    )
    engine_url: str = setting("text", default="http://127.0.0.1:8200", doc="Base URL of the decode engine.")
    protocol: Protocol = setting(
        choice("nixl", "prfaas"),
        default="nixl",
        doc="Hand-over between the engines: nixl (prefill first, then its kv_transfer_params go to decode) or prfaas (both at "
        "once, under the grant in x-prfaas-grant).",
    )
    prefill_hosts: tuple[str, ...] = setting(
        "text_list",
        default=(),
        doc="Hosts that x-prefiller-host-port may name: names, addresses, networks such as 10.0.0.0/8. When empty, addresses "
        "of private networks and of this machine, except link-local ones (169.254.0.0/16).",
    )
    prefill_scheme: PrefillScheme = setting(
        choice("http", "https"), default="http", doc="URL scheme of prefill engines, which the header does not contain."
    )
    prefill_sampling: bool = setting(
        "flag", default=False, doc="Take one of several hosts in the header at random instead of the first."
    )
    prefill_retries: int = setting(
        "count",
        default=0,
        only_where={"protocol": "nixl"},
        doc="Further tries of a prefill that was answered with 502, 503 or 504.",
    )
    prefill_failure: PrefillFailure = setting(
        choice("local", "fail"),
        default="local",
        doc="After a failed prefill: the decode engine computes the prompt (local), or the client gets the error (fail).",
    )
    tls_authority: Path | None = setting(
        "path", default=None, doc="PEM file: authority of the deployment's certificates."
    )
    tls_certificate: Path | None = setting("path", default=None, doc="PEM file: certificate of this sidecar.")
    tls_key: Path | None = setting("path", default=None, doc="PEM file: private key of that certificate.")
    tls_revocations: Path | None = setting(
        "path",
        default=None,
        only_where={"tls_authority": GIVEN},
        doc="PEM file: the authority's revocation list. The sidecar refuses the peers that it names.",
    )
    engine_tls: EngineTls = setting(
        choice("system", "deployment"),
        default="system",
        doc="Authority of engines at https URLs: the system's authorities, or tls_authority. The sidecar shows "
        "tls_certificate to engines of the deployment.",
    )

    def __post_init__(self) -> None:
        check_together(self, "tls_authority", "tls_certificate", "tls_key")
        check_consent(self, "listen", "status_listen")
        check_engine_tls(self)
        check_apart(self, "listen", "status_listen")
        check_url("engine_url", self.engine_url)

    def certificates(self, *, speaks: tuple[str, ...]) -> Certificates | None:
        """Return the certificates for peers; None for plain text. Raise ConfigError if they are unusable."""
        return Certificates.of(self, speaks=speaks)
