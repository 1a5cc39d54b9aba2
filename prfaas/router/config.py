"""Settings of `prfaas-router`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from prfaas.config import record, records, setting
from prfaas.config_checks import (
    ABSENT,
    GIVEN,
    check_addresses,
    check_apart,
    check_consent,
    check_engine_tls,
    check_salt,
    check_tls,
    check_url,
)
from prfaas.tracing import SETTING_DOC
from prfaas.transport.net.tls import TLS_DOC, EngineTls, TlsConfig
from prfaas.types import ClusterKind, ClusterName, InstanceRole, LocalPolicy
from prfaas.units import choice, is_loopback, split_address

PdProtocol = Literal["prfaas", "nixl"]
_ALONE = {"managers": ABSENT}  # With managers, their settings of the same names apply.


@dataclass(frozen=True)
class InstanceConfig:
    """One vLLM server and its agent."""

    name: str = setting("text", required=True, doc="Name of the instance, unique in the deployment.")
    url: str = setting("text", required=True, doc="Base URL of the OpenAI server, such as http://10.0.0.5:8000.")
    role: InstanceRole = setting(choice("prefill", "decode", "both"), required=True, doc="Role of the instance.")
    agent: str = setting("text", required=True, doc="Name of the agent on the same machine.")
    wire: str = setting("address", required=True, doc="Address at which other agents reach that agent.")

    def __post_init__(self) -> None:
        check_url("url", self.url)


@dataclass(frozen=True)
class ClusterConfig:
    """Equal machines on one fast network."""

    name: str = setting("text", required=True, doc="Name of the cluster.")
    kind: ClusterKind = setting(
        choice("prfaas", "pd"), required=True, doc="prfaas (prefills for other clusters) or pd (prefill and decode)."
    )
    instances: tuple[InstanceConfig, ...] = setting(records(InstanceConfig), default=(), doc="Engines of the cluster.")

    def __post_init__(self) -> None:
        decoding = [instance.name for instance in self.instances if instance.role == "decode"]
        if self.kind == "prfaas" and decoding:
            raise ValueError(f"instances: {decoding[0]} decodes, and a prfaas cluster never does; write role: prefill")


@dataclass(frozen=True)
class ClientTenantConfig:
    """Clients that share a cache."""

    tenant: str = setting("text", required=True, doc="Salt of the tenant, as in the agents' setting `tenants`.")
    clients: tuple[str, ...] = setting("text_list", required=True, doc="Client names in `api_keys_file`.")
    clusters: tuple[str, ...] = setting(
        "text_list", default=(), doc="Clusters that may see the prompts and their KV; empty: all."
    )

    def __post_init__(self) -> None:
        check_salt(self.tenant)


@dataclass(frozen=True)
class LimitsConfig:
    """Limits of all clients together. One client leaves an eighth of each to others."""

    REMOVED_SETTINGS: ClassVar[Mapping[str, str]] = {
        "client_ratio": "a client may use all but an eighth of each limit while no other client needs it"
    }
    connections: int = setting(
        "count",
        default=0,
        doc="Most connections of clients, within the limit on open files; 0: that limit, at most 65,536.",
    )
    body_bytes: int = setting("bytes", default=1 << 30, minimum=32 << 20, doc="Most request bodies in memory at once.")
    header_time: float = setting("seconds", default=20.0, doc="Longest wait for the headers of a request.")
    body_time: float = setting("seconds", default=60.0, doc="Longest wait for the body of a request.")


@dataclass(frozen=True)
class RouterConfig:
    """Settings of one router."""

    REMOVED_SETTINGS: ClassVar[Mapping[str, str]] = {
        "discovery": "managers name the instances, or `clusters` does",
        "without_prefill": "without a prefill instance the decode instance prefills",
        "max_transfer_bytes": "a transfer may bring 64 GiB",
        "max_body_bytes": "a request body may have 32 MiB",
        "requests_per_minute": "a gateway before the router limits the rates of clients",
        "tokens_per_minute": "a gateway before the router limits the rates of clients",
        "quotas": "a gateway before the router limits the rates of clients",
        "fetch_timeout": "a request waits at most 10 s for a prefix",
        "breaker_failures": "the circuit breaker opens after 5 failures in a row",
        "breaker_seconds": "the circuit breaker stays open for 10 s",
    }
    listen: str = setting("address", default="127.0.0.1:8080", doc="Address for clients.")
    ext_proc_listen: str = setting(
        "address", default="", doc="gRPC address of the endpoint picker for gateways; empty: off. Extra `site`."
    )
    tls: TlsConfig = setting(record(TlsConfig), formerly=("tls_*",), doc=TLS_DOC)
    client_tls: TlsConfig = setting(
        record(TlsConfig),
        formerly=("client_tls_*",),
        doc="Encryption of `listen`, with the keys of `tls`. With an authority, clients must show a certificate.",
    )
    insecure_plaintext: bool = setting(
        "flag",
        default=False,
        doc="Unencrypted listeners beyond loopback, for gateways and clients without keys, and legs to other clusters.",
    )
    secret_file: str = setting("path", required=True, doc="File with the deployment's secret, at least 32 bytes.")
    clusters: tuple[ClusterConfig, ...] = setting(
        records(ClusterConfig),
        default=(),
        doc="Clusters of a deployment without a manager; with managers, until one of them has answered.",
    )
    managers: tuple[str, ...] = setting(
        "text_list", default=(), doc="Managers (host:port), which know instances and caches, and decide."
    )
    cluster: str = setting("text", default="", doc="PD cluster of this router; empty: any instance may decode.")
    overflow: bool = setting(
        "flag",
        default=False,
        only_where={"cluster": GIVEN},
        doc="Requests may decode in another PD cluster if its cached tokens or shorter queues save 16K tokens of work.",
    )
    fleet_file: Path | None = setting(
        "path",
        default=None,
        only_where={"managers": GIVEN},
        doc="File that keeps the managers' last fleet. A router that reaches no manager starts with it; empty: none.",
    )
    manager_timeout: float = setting(
        "seconds",
        default=0.25,
        only_where={"managers": GIVEN},
        doc="Longest wait for a manager's decision; then the router decides alone.",
    )
    threshold_tokens: int = setting(
        "tokens",
        default=16_000,
        only_where=_ALONE,
        doc="Threshold t: a PrfaaS cluster prefills prompts with more uncached tokens. Managers have their own.",
    )
    local_policy: LocalPolicy = setting(
        choice("decode", "pd"),
        default="decode",
        only_where=_ALONE,
        doc="Prefill that no PrfaaS cluster takes: by the decode instance, or a prefill instance (pd).",
    )
    pd_protocol: PdProtocol = setting(
        choice("prfaas", "nixl"),
        default="prfaas",
        doc="Hand-over within a PD cluster: both legs at once through agents (prfaas), or prefill first (nixl).",
    )
    max_requests: int = setting("count", default=4096, minimum=1, doc="Most concurrent requests; beyond: status 429.")
    limits: LimitsConfig = setting(record(LimitsConfig), doc="Limits on connections and bodies, also for each client.")
    api_keys_file: Path | None = setting(
        "path",
        default=None,
        doc="Clients' keys, one per line, each with the client's name (else `default`); empty: open.",
    )
    operator_keys_file: Path | None = setting(
        "path",
        default=None,
        doc="Operators' keys for /metrics, /debug/decision, /health's instances; empty: open only without `api_keys_file`.",
    )
    tenants: tuple[ClientTenantConfig, ...] = setting(
        records(ClientTenantConfig),
        default=(),
        doc="Clients that share a cache; other clients have their own. Keys without a name belong to `tenant`.",
    )
    engine_api_key_file: Path | None = setting(
        "path", default=None, doc="File with the engines' key (vLLM's --api-key)."
    )
    transfer_deadline: float = setting("seconds", default=120.0, doc="Time after which a missing transfer has failed.")
    request_timeout: float = setting("seconds", default=600.0, doc="Time after which an unfinished answer has failed.")
    probe_interval: float = setting("seconds", default=1.0, doc="Time between two health checks of an engine.")
    silence_seconds: float = setting(
        "seconds",
        default=2.0,
        doc="Time without an answer to a health check, after which an engine gets no new requests. "
        "After half as long again its requests move to another engine.",
    )
    traces_endpoint: str = setting("text", default="", doc=SETTING_DOC)
    engine_tls: EngineTls = setting(
        choice("system", "deployment"),
        default="system",
        doc="Authority of https engines: the system's, or `tls.authority` (`deployment`), with `tls.certificate` shown.",
    )
    tenant: str = setting("text", default="", doc="Salt for clients without a name, and for all clients without keys.")

    def __post_init__(self) -> None:
        check_tls(self)
        check_engine_tls(self)
        check_consent(self, "ext_proc_listen")
        check_apart(self, "listen", "ext_proc_listen")
        check_addresses("managers", self.managers)
        if self.traces_endpoint:
            check_url("traces_endpoint", self.traces_endpoint, such_as="http://host:4318")
        self._check_clients()
        self._check_clusters()

    def _check_clusters(self) -> None:
        names = [cluster.name for cluster in self.clusters]
        if self.cluster and names and self.cluster not in names:
            raise ValueError(f"cluster: {self.cluster!r} is none of {', '.join(names)}")
        for cluster in self.clusters:
            roles = {instance.role for instance in cluster.instances} if cluster.kind == "pd" else set()
            if self.local_policy == "pd" and self.cluster in ("", cluster.name) and roles and "prefill" not in roles:
                raise ValueError(
                    f"local_policy: pd needs an instance that prefills, and cluster {cluster.name} has none; "
                    "write role: prefill at one of them, or local_policy: decode"
                )
        for cluster in self.clusters:
            for instance in cluster.instances:
                if self.exposes_prompts(instance.url, cluster.name, cluster.kind):
                    raise ValueError(
                        f"clusters: {instance.url} of {instance.name} would carry prompts unencrypted to another cluster; "
                        "write https:// and engine_tls: deployment, or insecure_plaintext: true"
                    )
        instances = [instance.name for cluster in self.clusters for instance in cluster.instances]
        for kind, given in (("cluster", names), ("instance", instances)):
            repeated = sorted({name for name in given if given.count(name) > 1})
            if repeated:
                raise ValueError(f"clusters: {kind} {repeated[0]} is named twice")
        has_pd = any(cluster.kind == "pd" and cluster.instances for cluster in self.clusters)
        if not self.managers and not has_pd:
            raise ValueError("clusters: no pd cluster with an instance and no managers; no instance can decode")

    def _check_clients(self) -> None:
        members = [client for tenant in self.tenants for client in tenant.clients]
        if len({tenant.tenant for tenant in self.tenants}) < len(self.tenants) or len(set(members)) < len(members):
            raise ValueError("tenants: a tenant is named twice, or a client belongs to two")
        if self.clusters_of_tenants() and not self.cluster:
            raise ValueError("cluster: missing; clusters of tenants need it")
        try:
            check_salt(self.tenant)
        except ValueError as error:
            raise ValueError(f"tenant: {error}") from error
        is_closed = self.api_keys_file or self.client_tls.authority
        if not (is_closed or self.insecure_plaintext or is_loopback(split_address(self.listen)[0])):
            raise ValueError(f"api_keys_file: missing; {self.listen} is beyond loopback, so anybody could connect")

    def exposes_prompts(self, url: str, cluster: str, kind: ClusterKind) -> bool:
        """Return whether legs to an engine would cross between clusters in plain text, although `tls` is set."""
        is_encrypted = not self.insecure_plaintext and self.tls.authority is not None
        is_far = cluster != self.cluster if self.cluster else kind == "prfaas"
        parts = urlsplit(url)
        return is_encrypted and is_far and parts.scheme == "http" and not is_loopback(parts.hostname or "")

    def clusters_of_tenants(self) -> dict[str, frozenset[ClusterName]]:
        """Return the clusters of each tenant that may not use all."""
        return {
            tenant.tenant: frozenset(map(ClusterName, tenant.clusters)) for tenant in self.tenants if tenant.clusters
        }
