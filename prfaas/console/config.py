"""Every setting of the command `prfaas`."""

from dataclasses import dataclass
from pathlib import Path

from prfaas.config import record, setting
from prfaas.config_checks import check_addresses, check_tls, check_url
from prfaas.transport.net.tls import TLS_DOC, TlsConfig


@dataclass(frozen=True)
class ConsoleConfig:
    """Addresses of a deployment and the credentials for it."""

    pages: tuple[str, ...] = setting(
        "text_list",
        default=("http://127.0.0.1:7411",),
        doc="HTTP pages of the managers (`http_listen`); the first that answers counts.",
    )
    routers: tuple[str, ...] = setting(
        "text_list", default=("http://127.0.0.1:8080",), doc="Routers for recent decisions; https:// with `client_tls`."
    )
    agents: tuple[str, ...] = setting(
        "text_list", default=("http://127.0.0.1:7401",), doc="Agents (`status_listen`), asked where no manager answers."
    )
    router_key_file: Path | None = setting("path", default=None, doc="File with an operator key of the routers.")
    managers: tuple[str, ...] = setting(
        "text_list", default=("127.0.0.1:7410",), doc="Managers (host:port) for changes of the deployment."
    )
    name: str = setting(
        "text", default="operator", doc="Operator name in the record; with TLS, the certificate's name."
    )
    secret_file: Path = setting(
        "path", default=Path("/etc/prfaas/secret"), doc="File with the deployment's secret, for changes only."
    )
    timeout: float = setting("seconds", default=5.0, minimum=0.1, doc="Time limit for an answer.")
    tls: TlsConfig = setting(record(TlsConfig), formerly=("tls_*",), doc=TLS_DOC)

    def __post_init__(self) -> None:
        check_tls(self)
        check_addresses("managers", self.managers)
        for name in ("pages", "routers", "agents"):
            for url in getattr(self, name):
                check_url(name, url)
