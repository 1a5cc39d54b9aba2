"""Every setting of `prfaas-router`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prfaas.config import record, records, setting
from prfaas.config_checks import (
    ABSENT,
    GIVEN,
    check_addresses,
    check_apart,
    check_consent,
    check_engine_tls,
    check_together,
    check_url,
)
from prfaas.router.http.admission import Quota, Tenants, check_salt
from prfaas.scheduler.snapshot import LocalPolicy, WithoutPrefill
from prfaas.tracing import SETTING_DOC
from prfaas.transport.net.tls import CertificateFiles, Certificates, EngineTls
from prfaas.types import ClusterKind, InstanceRole
from prfaas.units import choice, is_loopback, split_address

PdProtocol = Literal["prfaas", "nixl"]
_KUBERNETES = {"kubernetes_selector": GIVEN}
_ALONE = {"managers": ABSENT}  # managers decide, and have settings of the same names


@dataclass(frozen=True)
class InstanceConfig:
    """One vLLM server and the agent beside it."""

    name: str = setting("text", required=True, doc="Name of the instance, unique in the deployment.")
    url: str = setting("text", required=True, doc="Base URL of its OpenAI server, such as http://10.0.0.5:8000.")
    role: InstanceRole = setting(choice("prefill", "decode", "both"), required=True, doc="What it does.")
    agent: str = setting("text", required=True, doc="Name of the agent on its machine.")
    wire: str = setting("address", required=True, doc="Where other agents reach that agent's wire.")

    def __post_init__(self) -> None:
        check_url("url", self.url)


@dataclass(frozen=True)
class ClusterConfig:
    """Homogeneous machines on one fast network."""

    name: str = setting("text", required=True, doc="Name of the cluster.")
    kind: ClusterKind = setting(
        choice("prfaas", "pd"), required=True, doc="prfaas (prefills for other clusters) or pd (prefill and decode)."
    )
    instances: tuple[InstanceConfig, ...] = setting(records(InstanceConfig), default=(), doc="Its engines.")

    def __post_init__(self) -> None:
        decoding = [instance.name for instance in self.instances if instance.role == "decode"]
        if self.kind == "prfaas" and decoding:
            raise ValueError(f"instances: {decoding[0]} decodes, and a prfaas cluster never does; write role: prefill")


@dataclass(frozen=True)
class DiscoveryConfig:
    """Agents that are found, where no manager tells them; their pages say which engines stand beside them."""

    names: tuple[str, ...] = setting(
        "text_list",
        default=(),
        doc="host:port of agents' pages (status_listen): every address that the name has is asked.",
    )
    kubernetes_selector: str = setting(
        "text",
        default="",
        doc="Labels of the agents' pods in the router's namespace, such as app.kubernetes.io/name=prfaas-agent.",
    )
    kubernetes_port: int = setting(
        "count", default=7401, maximum=65535, only_where=_KUBERNETES, doc="Port of these pods' agent pages."
    )
    kubernetes_api: str = setting(
        "text",
        default="",
        only_where=_KUBERNETES,
        doc="URL of the API server; empty: that of the cluster in which the router is a pod.",
    )
    kubernetes_account: Path = setting(
        "path",
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        only_where=_KUBERNETES,
        doc="Directory with token, ca.crt and namespace of a service account that may list pods.",
    )
    interval: float = setting("seconds", default=10.0, minimum=0.01, doc="How often they are looked for.")
    expiry: float = setting("seconds", default=30.0, doc="An agent that has not answered for so long is gone.")

    def __post_init__(self) -> None:
        check_addresses("names", self.names)
        if self.kubernetes_api:
            check_url("kubernetes_api", self.kubernetes_api)

    @property
    def looks(self) -> bool:
        """Return whether there is anything to look for."""
        return bool(self.names or self.kubernetes_selector)


@dataclass(frozen=True)
class QuotaConfig:
    """What one client may ask for."""

    client: str = setting("text", required=True, doc="Which: the name after its keys in `api_keys_file`.")
    requests_per_minute: int = setting("count", default=0, doc="Its requests; 0: as many as it likes.")
    tokens_per_minute: int = setting(
        "tokens", default=0, doc="Its tokens, of prompts and answers; 0: as many as it likes."
    )


@dataclass(frozen=True)
class TenantConfig:
    """Clients that share a cache."""

    tenant: str = setting("text", required=True, doc="Its salt, as agents may have it under `tenants`.")
    clients: tuple[str, ...] = setting("text_list", required=True, doc="The names after their keys in `api_keys_file`.")

    def __post_init__(self) -> None:
        check_salt(self.tenant)


@dataclass(frozen=True)
class RouterConfig:
    """One front door."""

    listen: str = setting("address", default="127.0.0.1:8000", doc="Where clients connect.")
    ext_proc_listen: str = setting(
        "address",
        default="",
        doc="gRPC: where a gateway (Envoy's external processing) asks which endpoints to take; when empty none is "
        "answered. Needs the extra `gateway`.",
    )
    client_tls_certificate: Path | None = setting(
        "path",
        default=None,
        doc="PEM file: the certificate that clients are shown at `listen`, which is then encrypted.",
    )
    client_tls_key: Path | None = setting("path", default=None, doc="PEM file: its private key.")
    client_tls_authority: Path | None = setting(
        "path",
        default=None,
        only_where={"client_tls_certificate": GIVEN},
        doc="PEM file: whose certificates clients must show; when not given none is asked for.",
    )
    client_tls_revocations: Path | None = setting(
        "path",
        default=None,
        only_where={"client_tls_authority": GIVEN},
        doc="PEM file: that authority's revocation list; clients that it names are refused.",
    )
    insecure_plaintext: bool = setting(
        "flag",
        default=False,
        doc="Listen beyond loopback for gateways without certificates, and for clients without keys.",
    )
    secret_file: str = setting("path", required=True, doc="File with the deployment's secret, at least 32 bytes.")
    clusters: tuple[ClusterConfig, ...] = setting(
        records(ClusterConfig), default=(), only_where=_ALONE, doc="The clusters, where no manager tells them."
    )
    discovery: DiscoveryConfig = setting(record(DiscoveryConfig), doc="Where agents are found, without a manager.")
    managers: tuple[str, ...] = setting(
        "text_list", default=(), doc="Managers (host:port) that know the instances, what is cached where, and decide."
    )
    cluster: str = setting("text", default="", doc="This router's PD cluster; empty: any may decode.")
    manager_timeout: float = setting(
        "seconds",
        default=0.25,
        only_where={"managers": GIVEN},
        doc="How long a decision may take before the router decides without the manager.",
    )
    threshold_tokens: int = setting(
        "tokens",
        default=16_000,
        doc="t: prompts with more uncached tokens are prefilled by a PrfaaS cluster. A manager's own t counts before it.",
    )
    local_policy: LocalPolicy = setting(
        choice("decode", "pd"),
        default="decode",
        only_where=_ALONE,
        doc="What prefills a request that no PrfaaS cluster takes: the decode instance, or always a prefill instance of its "
        "own cluster.",
    )
    pd_protocol: PdProtocol = setting(
        choice("prfaas", "nixl"),
        default="prfaas",
        doc="How a prefill instance hands over to a decode instance of its own cluster: prfaas (both legs at once, through the "
        "agents) or nixl (prefill first, its kv_transfer_params go to decode: vLLM's NixlConnector and what speaks alike).",
    )
    without_prefill: WithoutPrefill = setting(
        choice("local", "refuse"),
        default="local",
        only_where=_ALONE,
        doc="A request that is to be prefilled elsewhere while no healthy instance is there to do it: its decode instance "
        "does (local), or it is refused with 503 (refuse).",
    )
    max_transfer_bytes: int = setting("bytes", default=64 << 30, doc="Most KV that one transfer may bring.")
    max_body_bytes: int = setting("bytes", default=32 << 20, doc="Largest request body.")
    max_requests: int = setting(
        "count", default=4096, minimum=1, doc="Requests under way at once; one more is told to come again (429)."
    )
    api_keys_file: Path | None = setting(
        "path",
        default=None,
        doc="File with the keys of the clients, one a line, each with its client's name after it or for the client `default`; "
        "when not given anybody is served.",
    )
    operator_keys_file: Path | None = setting(
        "path",
        default=None,
        doc="File with the keys of operators, one a line: for /metrics, /debug/decision, and the instances in /health. When "
        "not given these are refused where clients need a key, and open where they need none.",
    )
    requests_per_minute: int = setting(
        "count",
        default=0,
        doc="Requests of each client that `quotas` does not name; then it is told when to come again (429). 0: no limit.",
    )
    tokens_per_minute: int = setting(
        "tokens", default=0, doc="The same of tokens, of prompts and answers together. 0: no limit."
    )
    quotas: tuple[QuotaConfig, ...] = setting(
        records(QuotaConfig), default=(), doc="Limits of single clients. Each router counts by itself."
    )
    tenants: tuple[TenantConfig, ...] = setting(
        records(TenantConfig),
        default=(),
        doc="Clients that share a cache. Each that is not named here has one of its own; keys without a name are of `tenant`.",
    )
    engine_api_key_file: Path | None = setting(
        "path", default=None, doc="File with the key that the engines ask for (vLLM's --api-key)."
    )
    transfer_deadline: float = setting(
        "seconds", default=120.0, doc="When a transfer that has not arrived is given up."
    )
    fetch_timeout: float = setting(
        "seconds",
        default=10.0,
        only_where={"managers": GIVEN},
        doc="How long a request waits for a prefix that is fetched from another cluster; then it is computed.",
    )
    request_timeout: float = setting("seconds", default=600.0, doc="When an answer that has not ended is given up.")
    probe_interval: float = setting("seconds", default=2.0, doc="How often engines are asked for their health.")
    breaker_failures: int = setting(
        "count",
        default=5,
        doc="After so many requests on end that an engine took and did not answer, it is left alone for breaker_seconds; "
        "then one more failure does. 0: never.",
    )
    breaker_seconds: float = setting("seconds", default=10.0, doc="How long an engine that fails is left alone.")
    traces_endpoint: str = setting("text", default="", doc=SETTING_DOC)
    tls_authority: Path | None = setting("path", default=None, doc="PEM file: who signed the managers' certificates.")
    tls_certificate: Path | None = setting(
        "path", default=None, doc="PEM file: this router's certificate, for the name router."
    )
    tls_key: Path | None = setting("path", default=None, doc="PEM file: its private key.")
    tls_revocations: Path | None = setting(
        "path",
        default=None,
        only_where={"tls_authority": GIVEN},
        doc="PEM file: the authority's revocation list; gateways that it names are refused.",
    )
    engine_tls: EngineTls = setting(
        choice("system", "deployment"),
        default="system",
        doc="Who vouches for engines whose URLs begin with https: the system's authorities, or tls_authority; to engines of "
        "the deployment the router shows tls_certificate.",
    )
    tenant: str = setting(
        "text",
        default="",
        doc="Salt of the hashes of clients without a name, and of everybody where no keys are asked for.",
    )

    def __post_init__(self) -> None:
        check_together(self, "tls_authority", "tls_certificate", "tls_key")
        check_engine_tls(self)
        check_together(self, "client_tls_certificate", "client_tls_key")
        check_consent(self, "ext_proc_listen")
        check_apart(self, "listen", "ext_proc_listen")
        check_addresses("managers", self.managers)
        if self.traces_endpoint:
            check_url("traces_endpoint", self.traces_endpoint, such_as="http://host:4318")
        self._check_clients()
        clusters = [cluster.name for cluster in self.clusters]
        if self.cluster and clusters and self.cluster not in clusters:
            raise ValueError(f"cluster: {self.cluster!r} is none of {', '.join(clusters)}")
        for its in self.clusters:
            roles = {instance.role for instance in its.instances} if its.kind == "pd" else set()
            if self.local_policy == "pd" and self.cluster in ("", its.name) and roles and "prefill" not in roles:
                raise ValueError(
                    f"local_policy: pd needs an instance that prefills, and cluster {its.name} has none; "
                    "write role: prefill at one of them, or local_policy: decode"
                )
        names = [instance.name for cluster in self.clusters for instance in cluster.instances]
        for what, given in (("cluster", clusters), ("instance", names)):
            twice = sorted({name for name in given if given.count(name) > 1})
            if twice:
                raise ValueError(f"clusters: {what} {twice[0]} is named twice")
        if self.discovery.looks and (self.managers or self.clusters):
            raise ValueError("discovery: managers and clusters name the instances; leave one of them out")
        if (
            not self.managers
            and not self.discovery.looks
            and not any(cluster.kind == "pd" and cluster.instances for cluster in self.clusters)
        ):
            raise ValueError(
                "clusters: no pd cluster with an instance, no managers and no discovery; nobody could decode"
            )

    def _check_clients(self) -> None:
        if len({quota.client for quota in self.quotas}) < len(self.quotas):
            raise ValueError("quotas: a client is named twice")
        members = [client for tenant in self.tenants for client in tenant.clients]
        if len({tenant.tenant for tenant in self.tenants}) < len(self.tenants) or len(set(members)) < len(members):
            raise ValueError("tenants: a tenant is named twice, or a client is of two")
        try:
            check_salt(self.tenant)
        except ValueError as error:
            raise ValueError(f"tenant: {error}") from error
        asks = self.api_keys_file or self.client_tls_authority
        if not (asks or self.insecure_plaintext or is_loopback(split_address(self.listen)[0])):
            raise ValueError(f"api_keys_file: missing; {self.listen} is beyond loopback, where everybody could ask")

    def default_quota(self) -> Quota:
        """Of each client that has none of its own."""
        return Quota(self.requests_per_minute, self.tokens_per_minute)

    def quotas_by_client(self) -> dict[str, Quota]:
        """Of those that have."""
        return {quota.client: Quota(quota.requests_per_minute, quota.tokens_per_minute) for quota in self.quotas}

    def client_tenants(self) -> Tenants:
        """Whose cache each client's requests use."""
        return Tenants({client: tenant.tenant for tenant in self.tenants for client in tenant.clients}, self.tenant)

    def certificates(self, *, speaks: tuple[str, ...]) -> Certificates | None:
        """What gateways are shown and asked for; None: plain text. Raises ConfigError when they cannot be used."""
        return Certificates.of(self, speaks=speaks)

    def client_certificates(self) -> Certificates | None:
        """What clients are shown, and asked for where they must show any; None: plain text. Raises ConfigError as above."""
        its = self
        if not (its.client_tls_certificate and its.client_tls_key):
            return None
        files = (its.client_tls_authority, its.client_tls_certificate, its.client_tls_key, its.client_tls_revocations)
        return Certificates(CertificateFiles(*files), speaks=("http/1.1",))
