"""Settings of `prfaas-sidecar`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from prfaas.config import record, setting
from prfaas.config_checks import check_apart, check_consent, check_engine_tls, check_tls, check_url
from prfaas.transport.net.tls import TLS_DOC, EngineTls, TlsConfig
from prfaas.units import choice

Protocol = Literal["nixl", "prfaas"]


@dataclass(frozen=True)
class SidecarConfig:
    """Settings of one sidecar and its decode engine."""

    REMOVED_SETTINGS: ClassVar[Mapping[str, str]] = {
        "prefill_timeout": "a prefill that has not ended after 120 s has failed",
        "request_timeout": "an answer that has not ended after 600 s has failed",
        "max_body_bytes": "a request body may have 32 MiB",
        "prefill_scheme": "prefill engines have the scheme of `engine_url`",
        "prefill_sampling": "the first host of the header prefills",
        "prefill_retries": "after a failed prefill the decode engine computes the prompt",
        "prefill_failure": "after a failed prefill the decode engine computes the prompt",
    }
    listen: str = setting("address", default="127.0.0.1:8000", doc="Address for the gateway.")
    status_listen: str = setting(
        "address", default="127.0.0.1:8011", doc="HTTP address of the sidecar's own /metrics and /healthz."
    )
    insecure_plaintext: bool = setting(
        "flag", default=False, doc="Unencrypted listeners beyond loopback, open to everybody."
    )
    engine_url: str = setting(
        "text",
        default="http://127.0.0.1:8200",
        doc="Base URL of the decode engine. Prefill engines have the same scheme.",
    )
    protocol: Protocol = setting(
        choice("nixl", "prfaas"),
        default="nixl",
        doc="Hand-over: prefill first, then kv_transfer_params to decode (nixl), or both at once (prfaas).",
    )
    prefill_hosts: tuple[str, ...] = setting(
        "text_list",
        default=(),
        doc="Hosts or networks allowed in x-prefiller-host-port; empty: this machine, private networks, not link-local.",
    )
    tls: TlsConfig = setting(record(TlsConfig), formerly=("tls_*",), doc=TLS_DOC)
    engine_tls: EngineTls = setting(
        choice("system", "deployment"),
        default="system",
        doc="Authority of https engines: the system's, or `tls.authority` (`deployment`), with `tls.certificate` shown.",
    )

    def __post_init__(self) -> None:
        check_tls(self)
        check_consent(self, "listen", "status_listen")
        check_engine_tls(self)
        check_apart(self, "listen", "status_listen")
        check_url("engine_url", self.engine_url)
