"""Settings of `prfaas-agent`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from prfaas.cachepool.capacity import TenantShares
from prfaas.config import record, records, setting
from prfaas.config_checks import (
    check_addresses,
    check_apart,
    check_consent,
    check_consent_of_wire,
    check_engine_tls,
    check_node_name,
    check_socket_path,
    check_tls,
    check_url,
)
from prfaas.tracing import SETTING_DOC
from prfaas.transport.net.sockets import PacketMarks
from prfaas.transport.net.tls import TLS_DOC, Certificates, EngineTls, TlsConfig
from prfaas.types import ClusterKind, InstanceRole
from prfaas.units import choice, is_loopback, split_address

MIN_TENANT_WEIGHT = 0.001  # A tenant without room in the pool is slow on links, but not stuck.


@dataclass(frozen=True)
class EngineConfig:
    """One engine on this machine, as routers reach it."""

    REMOVED_SETTINGS: ClassVar[Mapping[str, str]] = {
        "kv_events": "transfers are served from the pool, never from an engine's own cache",
        "kv_events_replay": "transfers are served from the pool, never from an engine's own cache",
    }

    instance: str = setting("text", required=True, doc="Name of the instance, unique in the deployment.")
    url: str = setting("text", required=True, doc="Base URL of the OpenAI server, such as http://10.0.0.5:8000.")
    role: InstanceRole = setting(choice("prefill", "decode", "both"), required=True, doc="Role of the instance.")
    model: str = setting(
        "text",
        default="",
        doc="Served model name, as hashed by the connector; empty: of the first engine that attaches.",
    )
    tls_listen: str = setting(
        "address",
        default="",
        doc="Address at which the agent serves the engine to routers, encrypted with `tls`; empty: routers reach `url`.",
    )

    def __post_init__(self) -> None:
        check_url("url", self.url)
        if self.tls_listen and not is_loopback(urlsplit(self.url).hostname or ""):
            raise ValueError(f"url: {self.url} is beyond loopback; with tls_listen, only the agent reaches the engine")


@dataclass(frozen=True)
class TenantShareConfig:
    """One tenant with its own share of the pool."""

    tenant: str = setting("text", required=True, doc="Salt of the tenant, as in the routers' setting `tenants`.")
    ratio: float = setting("ratio", required=True, doc="Largest share of the prefix blocks, and weight on links.")


@dataclass(frozen=True)
class PeerRateConfig:
    """Rate limit for transfers to some peers."""

    peers: str = setting("text", required=True, doc="Agent name, or a pattern such as tokyo-*.")
    max_rate: float = setting("rate", default=0.0, doc="Rate of all matching peers together; 0: no limit.")
    each: bool = setting("flag", default=False, doc="Separate limit for each peer.")


@dataclass(frozen=True)
class AgentConfig:
    """One machine's agent."""

    REMOVED_SETTINGS: ClassVar[Mapping[str, str]] = {
        "eviction": "the least recently used blocks leave first",
        "newcomer_ratio": "the agent learns the share of probation blocks",
        "learn_newcomer_ratio": "the agent learns the share of probation blocks",
        "ssd_threads": "the agent reads and writes 8 blocks at a time",
        "ssd_read_rate": "the agent reads as fast as the disk allows",
        "ssd_wait_seconds": "engines wait 5 s for the SSD",
        "num_connections": "the agent chooses the number by round trip",
        "congestion_control": "the agent uses BBR where the kernel has it",
        "max_link_rate": 'write `egress: [{peers: "*", max_rate: RATE, each: true}]`',
        "peers": "the first transfer of an engine with another layout fails with `layout_mismatch`",
        "drain_seconds": "`prfaas drain NODE` copies hot prefixes to other nodes before a stop",
        "hardware": "the deployment file names each cluster's hardware",
        "ingress": "limit what the senders send with `egress`",
        "link_probe_bytes": "transfers show what a link carries, and the deployment file says it before",
        "lossy_fp8": "blocks travel unchanged; an engine with `--kv-cache-dtype fp8` halves them at their source",
    }

    name: str = setting("text", required=True, doc="Unique name of this node: letters, digits, '.', '_' and '-'.")
    socket: Path = setting("path", default=Path("/run/prfaas/agent.sock"), doc="Unix socket at which engines attach.")
    listen: str = setting("address", default="127.0.0.1:7400", doc="Address for KV from other agents.")
    status_listen: str = setting(
        "address", default="127.0.0.1:7401", doc="HTTP: /metrics, /healthz, /transfers, /status."
    )
    secret_file: Path = setting("path", required=True, doc="File with the deployment's secret, at least 32 bytes.")
    pool_bytes: int = setting("bytes", default=4 << 30, minimum=1 << 12, doc="Host memory for KV, over all layouts.")
    populate_pool: bool = setting(
        "flag",
        default=False,
        doc="Take the whole pool's memory once an engine attaches, so that it counts as the agent's, not the engine's. "
        "For engines of one model.",
    )
    transfer_ratio: float = setting("ratio", default=0.5, doc="Share of the pool for transfers in flight.")
    tenant_ratio: float = setting(
        "ratio", default=1.0, doc="Largest share of the prefix blocks for each tenant outside `tenants`; 1: no limit."
    )
    tenants: tuple[TenantShareConfig, ...] = setting(
        records(TenantShareConfig), default=(), doc="Shares of single tenants, guaranteed if they add up to at most 1."
    )
    ssd_directory: Path | None = setting(
        "path", default=None, doc="Directory on a local SSD for prefix blocks; empty: memory only."
    )
    ssd_bytes: int = setting("bytes", default=64 << 30, doc="Size of `ssd_directory`, over all layouts.")
    ssd_write_rate: float = setting(
        "rate", default=0.0, doc="Largest write rate to the SSD, against wear; 0: no limit."
    )
    egress: tuple[PeerRateConfig, ...] = setting(
        records(PeerRateConfig),
        default=(),
        doc="Limits for sending to several peers; every entry that matches a peer applies.",
    )
    dscp: PacketMarks = setting(record(PacketMarks), doc="Marks of KV packets for the network; 0: unmarked.")
    compression: str = setting(
        choice("auto", "off"),
        default="auto",
        doc="auto: lossless compression while the link is full and a sample shows a gain; off.",
    )
    silence_seconds: float = setting(
        "seconds",
        default=2.0,
        formerly=("reconnect_seconds",),
        doc="Longest silence of a peer, or of an engine that answers no health checks: a transfer fails after this time "
        "without a connection or a sign of life.",
    )
    open_timeout_seconds: float = setting(
        "seconds", default=5.0, doc="Longest wait for a transfer that its sender has not opened."
    )
    fetch_from: tuple[str, ...] = setting(
        "text_list",
        default=(),
        doc="Agents (name=host:port) that this agent dials to receive from, because they cannot dial.",
    )
    dialled_by: tuple[str, ...] = setting(
        "text_list", default=(), doc="Agents with this agent in `fetch_from`; never dialled by this agent."
    )
    managers: tuple[str, ...] = setting("text_list", default=(), doc="Managers (host:port) to report to; empty: none.")
    traces_endpoint: str = setting("text", default="", doc=SETTING_DOC)
    tls: TlsConfig = setting(record(TlsConfig), formerly=("tls_*",), doc=TLS_DOC)
    engine_tls: EngineTls = setting(
        choice("system", "deployment"),
        default="system",
        doc="Authority of https engines: the system's, or `tls.authority` (`deployment`), with `tls.certificate` shown.",
    )
    cluster: str = setting("text", default="", doc="Name of this node's cluster; required with `managers`.")
    cluster_kind: ClusterKind = setting(
        choice("prfaas", "pd"), default="pd", doc="prfaas (prefill for other clusters) or pd (prefill and decode)."
    )
    advertise: str = setting(
        "address",
        default="",
        doc="Address of `listen` for other agents, if different; names are resolved at each dial.",
    )
    engines: tuple[EngineConfig, ...] = setting(records(EngineConfig), default=(), doc="Engines beside this agent.")
    insecure_plaintext: bool = setting(
        "flag",
        default=False,
        doc="Unencrypted traffic beyond private networks or despite certificates; pages beyond loopback.",
    )

    def __post_init__(self) -> None:
        check_node_name("name", self.name)
        check_socket_path("socket", self.socket)
        if len({tenant.tenant for tenant in self.tenants}) < len(self.tenants):
            raise ValueError("tenants: a tenant is named twice")
        if self.ssd_directory is not None and not self.ssd_bytes:
            raise ValueError("ssd_bytes: 0; write a size such as 64GiB, or no ssd_directory")
        check_tls(self)
        check_engine_tls(self)
        check_consent(self, "status_listen")
        check_consent_of_wire(self, "listen")
        check_apart(self, "listen", "status_listen")
        check_addresses("managers", self.managers)
        if self.traces_endpoint:
            check_url("traces_endpoint", self.traces_endpoint, such_as="http://host:4318")
        instances = [engine.instance for engine in self.engines]
        if twice := sorted({name for name in instances if instances.count(name) > 1}):
            raise ValueError(f"engines: instance {twice[0]} is named twice")
        for engine in self.engines:
            if engine.tls_listen and self.tls.certificate is None:
                raise ValueError("engines: tls_listen needs tls.authority, tls.certificate and tls.key")
        self.fetch_addresses()
        if self.managers and not self.cluster:
            raise ValueError("cluster: missing; managers know nodes by their cluster")

    def shares(self) -> TenantShares:
        """Return the shares of tenants and of probation blocks."""
        tenants = {tenant.tenant: tenant.ratio for tenant in self.tenants}
        return TenantShares(learns=True, each_tenant=self.tenant_ratio, of_tenants=tenants)

    def tenant_weight(self, tenant: str) -> float:
        """Return the weight of a tenant on links: its share of the pool."""
        shares = {entry.tenant: entry.ratio for entry in self.tenants}
        return max(MIN_TENANT_WEIGHT, shares.get(tenant, self.tenant_ratio))

    def fetch_addresses(self) -> dict[str, str]:
        """Return address by name of the agents in `fetch_from`.

        Raises:
            ValueError: An entry has another form.
        """
        pairs = [entry.partition("=") for entry in self.fetch_from]
        for (name, _, address), entry in zip(pairs, self.fetch_from, strict=True):
            try:
                split_address(address)
            except ValueError as error:
                raise ValueError(f"fetch_from: {entry!r}: {error}; write name=host:port") from error
            if not name:
                raise ValueError(f"fetch_from: {entry!r}; write name=host:port")
        return {name: address for name, _, address in pairs}

    def certificates(self, *, alpn_protocols: tuple[str, ...] = ()) -> Certificates | None:
        """Return the certificates for the wire and for pages beyond loopback; None for plain text.

        Raises:
            ConfigError: The files cannot be used.
        """
        return None if self.insecure_plaintext else Certificates.of(self.tls, alpn_protocols=alpn_protocols)

    def engine_certificates(self) -> Certificates | None:
        """Return the certificates for engines with https URLs; None to trust the system's authorities.

        Raises:
            ConfigError: The files cannot be used.
        """
        return Certificates.of(self.tls) if self.engine_tls == "deployment" else None
