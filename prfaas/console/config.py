"""Every setting of the command `prfaas`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prfaas.config import setting
from prfaas.config_checks import GIVEN, check_addresses, check_together, check_url


@dataclass(frozen=True)
class ConsoleConfig:
    """Where the deployment is, and as whom one speaks to it."""

    pages: tuple[str, ...] = setting(
        "text_list",
        default=("http://127.0.0.1:7411",),
        doc="HTTP pages of the managers (http_listen); the first that answers.",
    )
    routers: tuple[str, ...] = setting(
        "text_list",
        default=("http://127.0.0.1:8000",),
        doc="Routers that are asked for their latest decisions; at https:// those that have client_tls_certificate.",
    )
    router_key_file: Path | None = setting(
        "path", default=None, doc="File with the key that the routers ask of operators (their operator_keys_file)."
    )
    managers: tuple[str, ...] = setting(
        "text_list", default=("127.0.0.1:7410",), doc="Managers (host:port) that carry out what changes the deployment."
    )
    name: str = setting(
        "text", default="operator", doc="The name under which changes are recorded; with TLS the certificate's."
    )
    secret_file: Path = setting(
        "path", default=Path("/etc/prfaas/secret"), doc="File with the deployment's secret; only changes need it."
    )
    timeout: float = setting("seconds", default=5.0, minimum=0.1, doc="How long an answer may take.")
    tls_authority: Path | None = setting("path", default=None, doc="PEM file: who signed the managers' certificates.")
    tls_certificate: Path | None = setting("path", default=None, doc="PEM file: the certificate of `name`.")
    tls_key: Path | None = setting("path", default=None, doc="PEM file: its private key.")
    tls_revocations: Path | None = setting(
        "path",
        default=None,
        only_where={"tls_authority": GIVEN},
        doc="PEM file: the authority's revocation list; pages of whom it names are refused, and whether `name` is one is said.",
    )

    def __post_init__(self) -> None:
        check_together(self, "tls_authority", "tls_certificate", "tls_key")
        check_addresses("managers", self.managers)
        for name in ("pages", "routers"):
            for url in getattr(self, name):
                check_url(name, url)
