"""Every setting of `prfaas-agent`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prfaas.cachepool.capacity import TenantShares
from prfaas.cachepool.eviction import policy_of
from prfaas.cachepool.ssd import SsdSettings
from prfaas.config import records, setting
from prfaas.config_checks import (
    GIVEN,
    check_addresses,
    check_apart,
    check_consent,
    check_consent_of_wire,
    check_engine_tls,
    check_node_name,
    check_socket_path,
    check_together,
    check_url,
)
from prfaas.index.engine.events import check_endpoint
from prfaas.tracing import SETTING_DOC
from prfaas.transport.net.tls import Certificates, EngineTls
from prfaas.units import choice, split_address


@dataclass(frozen=True)
class EngineConfig:
    """One engine beside this agent, as routers reach it."""

    instance: str = setting("text", required=True, doc="Name of the instance, unique in the deployment.")
    url: str = setting("text", required=True, doc="Base URL of its OpenAI server, such as http://10.0.0.5:8000.")
    role: str = setting("text", required=True, doc="What it does: prefill, decode or both.")
    model: str = setting(
        "text", required=True, doc="The model's served name, which its connector hashes prompts under."
    )

    kv_events: str = setting(
        "text",
        default="",
        doc="Where it publishes its KV events (kv_events_config of vLLM), such as tcp://127.0.0.1:5557.",
    )
    kv_events_replay: str = setting("text", default="", doc="Where it repeats KV events that were lost.")

    def __post_init__(self) -> None:
        check_url("url", self.url)
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events: missing; kv_events_replay repeats them")
        for name in ("kv_events", "kv_events_replay"):
            if endpoint := getattr(self, name):
                _check_endpoint(name, endpoint)
        if self.role not in ("prefill", "decode", "both"):
            raise ValueError(f"role: {self.role!r}; write prefill, decode or both")


def _check_endpoint(name: str, endpoint: str) -> None:
    try:
        check_endpoint(endpoint)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True)
class TenantConfig:
    """One tenant whose share of the pool is its own."""

    tenant: str = setting(
        "text",
        required=True,
        doc="Its salt: of the routers a tenant, a client or `tenant`.",
    )
    ratio: float = setting("ratio", required=True, doc="Share of the prefix blocks' room that it may hold.")


@dataclass(frozen=True)
class EgressConfig:
    """What this node may send to some others together."""

    peers: str = setting("text", required=True, doc="Which: an agent's name, or a pattern such as tokyo-*.")
    max_rate: float = setting(
        "rate",
        default=0.0,
        doc="What all connections to them may send together; those that send share it. 0: learned, where the way to them "
        "loses bytes for seconds on end, from what arrives meanwhile.",
    )
    each: bool = setting(
        "flag", default=False, doc="Whether `max_rate` is of each of them by itself, in place of all together."
    )


@dataclass(frozen=True)
class IngressConfig:
    """What some others may send to this node together."""

    peers: str = setting("text", required=True, doc="Which: an agent's name, or a pattern such as tokyo-*.")
    max_rate: float = setting(
        "rate", required=True, minimum=1.0, doc="What they may send here together; those that send share it."
    )
    each: bool = setting(
        "flag", default=False, doc="Whether `max_rate` is of each of them by itself, in place of all together."
    )


@dataclass(frozen=True)
class AgentConfig:
    """One machine's agent."""

    name: str = setting(
        "text", required=True, doc="Name of this node, unique in the deployment; letters, digits, '.', '_' and '-'."
    )
    socket: Path = setting("path", default=Path("/run/prfaas/agent.sock"), doc="Unix socket at which engines attach.")
    listen: str = setting("address", default="127.0.0.1:7400", doc="Where other agents' KV arrives.")
    status_listen: str = setting(
        "address", default="127.0.0.1:7401", doc="HTTP: /metrics, /healthz, /transfers, /status."
    )
    secret_file: Path = setting("path", required=True, doc="File with the deployment's secret, at least 32 bytes.")
    hardware: str = setting(
        "text",
        default="",
        doc="What computes on this machine, such as H200; empty: its NVIDIA GPUs' names. Managers refuse nodes of unlike "
        "hardware in one cluster.",
    )
    pool_bytes: int = setting("bytes", default=4 << 30, minimum=1 << 12, doc="Host memory for KV, over all layouts.")
    transfer_ratio: float = setting("ratio", default=0.5, doc="Share of the pool that transfers in flight may take.")
    eviction: str = setting("text", default="lru", doc="Which prefix blocks leave first: lru, lfu or cost.")
    newcomer_ratio: float = setting(
        "ratio",
        default=1.0,
        doc="Most of the prefix blocks' room that those may take that nobody asks for again, once it is full; 1: no limit.",
    )
    learn_newcomer_ratio: bool = setting(
        "flag", default=True, doc="Lower that share as far as what is missed later shows that it should be lower."
    )
    tenant_ratio: float = setting(
        "ratio", default=1.0, doc="Share of that room for each tenant that `tenants` does not name; 1: no limit."
    )
    tenants: tuple[TenantConfig, ...] = setting(
        records(TenantConfig),
        default=(),
        doc="Shares of single tenants; where all add up to 1, each is sure of its own.",
    )
    ssd_directory: Path | None = setting(
        "path", default=None, doc="Directory on a local SSD for prefix blocks below the pool; none: memory alone."
    )
    ssd_bytes: int = setting("bytes", default=64 << 30, doc="Room in `ssd_directory`, over all layouts.")
    ssd_threads: int = setting(
        "count", default=8, doc="Blocks that are written, and read, at the same time.", minimum=1
    )
    ssd_write_rate: float = setting(
        "rate", default=0.0, doc="What is written to the SSD at most; 0: what it allows. Bounds its wear, too."
    )
    ssd_read_rate: float = setting("rate", default=0.0, doc="What is read from the SSD at most; 0: what it allows.")
    ssd_wait_seconds: float = setting(
        "seconds", default=5.0, doc="How long an engine waits for blocks from the SSD before it computes them."
    )
    num_connections: int = setting(
        "count", default=0, doc="TCP connections per peer agent; 0: as many as the round trip asks for."
    )
    max_link_rate: float = setting(
        "rate", default=0.0, doc="What all connections to one peer agent may send together; 0: what the link allows."
    )
    egress: tuple[EgressConfig, ...] = setting(
        records(EgressConfig),
        default=(),
        doc="Limits over several peers, such as those of one cluster; every entry that fits a peer holds for it.",
    )
    ingress: tuple[IngressConfig, ...] = setting(
        records(IngressConfig),
        default=(),
        doc="Limits over what peers send here, of which each hears its share; every entry that fits a peer holds for it. "
        "Agents that do not know of them send as before.",
    )
    link_probe_bytes: int = setting(
        "bytes",
        default=2 << 30,
        doc="Most bytes of one probe of a link, which this agent sends or takes when a manager wants to know what an idle link "
        "carries; 0: it does neither.",
    )
    congestion_control: str = setting(
        "text", default="bbr", doc="TCP congestion control; the kernel's own default where it has no such."
    )
    compression: str = setting(
        "text",
        default="auto",
        doc="auto: chunks are compressed while the link is full and a sample shows that it makes them faster; off.",
    )
    lossy_fp8: bool = setting(
        "flag",
        default=False,
        doc="LOSSY: attention blocks (bfloat16) travel as 8-bit floats, in half the bytes, to and from agents that say so "
        "too; answers may differ. Engines whose attention has another dtype are refused.",
    )
    reconnect_seconds: float = setting(
        "seconds", default=3.0, doc="How long a transfer survives with no connection to its peer."
    )
    open_timeout_seconds: float = setting(
        "seconds",
        default=15.0,
        doc="How long an engine waits for a transfer that its sender has not even opened; it then computes the prompt.",
    )
    peers: tuple[str, ...] = setting(
        "text_list",
        default=(),
        doc="Agents (name=host:port) whose layouts must equal ours before an engine may attach.",
    )
    fetch_from: tuple[str, ...] = setting(
        "text_list",
        default=(),
        doc="Agents (name=host:port) that cannot dial this one: it dials them, and receives over these connections.",
    )
    dialled_by: tuple[str, ...] = setting(
        "text_list",
        default=(),
        doc="Names of agents that dial this one to receive from it (their fetch_from); it never dials them.",
    )
    managers: tuple[str, ...] = setting(
        "text_list", default=(), doc="Managers (host:port) to report to; none: this agent stands alone."
    )
    traces_endpoint: str = setting("text", default="", doc=SETTING_DOC)
    tls_authority: Path | None = setting(
        "path", default=None, doc="PEM file: who signed managers' and agents' certificates."
    )
    tls_certificate: Path | None = setting(
        "path", default=None, doc="PEM file: this agent's certificate, for its name."
    )
    tls_key: Path | None = setting("path", default=None, doc="PEM file: its private key.")
    tls_revocations: Path | None = setting(
        "path",
        default=None,
        only_where={"tls_authority": GIVEN},
        doc="PEM file: the authority's revocation list; agents whose certificates it names are refused.",
    )
    engine_tls: EngineTls = setting(
        choice("system", "deployment"),
        default="system",
        doc="Who vouches for engines whose URLs begin with https: the system's authorities, or tls_authority; to engines of "
        "the deployment the agent shows tls_certificate.",
    )
    cluster: str = setting("text", default="", doc="Name of this node's cluster; needed with managers.")
    cluster_kind: str = setting("text", default="pd", doc="prfaas (prefill for others) or pd (prefill and decode).")
    advertise: str = setting(
        "address",
        default="",
        doc="Where other agents reach `listen`, when that differs from it. They look a name up at each dial: one that "
        "resolves later will do.",
    )
    drain_seconds: float = setting(
        "seconds",
        default=0.0,
        doc="How long an agent that is told to stop may take to give away what is asked for and only here; 0: it just stops.",
    )
    engines: tuple[EngineConfig, ...] = setting(records(EngineConfig), default=(), doc="The engines beside this agent.")
    insecure_plaintext: bool = setting(
        "flag",
        default=False,
        doc="Leave the wire between agents unencrypted where certificates are set, or beyond private networks; and the pages "
        "beyond loopback.",
    )

    def __post_init__(self) -> None:
        check_node_name("name", self.name)
        check_socket_path("socket", self.socket)
        policy_of(self.eviction)
        if len({tenant.tenant for tenant in self.tenants}) < len(self.tenants):
            raise ValueError("tenants: one is named twice")
        if self.ssd_directory is not None and not self.ssd_bytes:
            raise ValueError("ssd_bytes: 0; write a size such as 64GiB, or no ssd_directory")
        check_together(self, "tls_authority", "tls_certificate", "tls_key")
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
        if self.cluster_kind not in ("prfaas", "pd"):
            raise ValueError(f"cluster_kind: {self.cluster_kind!r}; write prfaas or pd")
        _addresses("fetch_from", self.fetch_from)
        _addresses("peers", self.peers)
        if self.compression not in ("auto", "off"):
            raise ValueError(f"compression: {self.compression!r}; write auto or off")
        if self.managers and not self.cluster:
            raise ValueError("cluster: missing; managers know nodes by their cluster")

    def shares(self) -> TenantShares:
        """Who may hold how much of the room for prefix blocks."""
        tenants = {tenant.tenant: tenant.ratio for tenant in self.tenants}
        return TenantShares(self.newcomer_ratio, self.learn_newcomer_ratio, self.tenant_ratio, tenants)

    def ssd(self) -> SsdSettings | None:
        """The SSD tier, if there is one."""
        if self.ssd_directory is None:
            return None
        return SsdSettings(
            self.ssd_directory,
            self.ssd_bytes,
            num_threads=self.ssd_threads,
            write_bytes_per_second=self.ssd_write_rate,
            read_bytes_per_second=self.ssd_read_rate,
        )

    def fetch_addresses(self) -> dict[str, str]:
        """Address by name of the agents that this one dials to receive."""
        return _addresses("fetch_from", self.fetch_from)

    def certificates(self, *, speaks: tuple[str, ...] = ()) -> Certificates | None:
        """What the wire, and pages beyond loopback, show and ask for; None: they speak plain text.

        Raises:
            ConfigError: the files cannot be used.
        """
        return None if self.insecure_plaintext else Certificates.of(self, speaks=speaks)

    def engine_certificates(self) -> Certificates | None:
        """What engines at https are shown and asked for; None: the system's authorities vouch for them.

        Raises:
            ConfigError: the files cannot be used.
        """
        return Certificates.of(self) if self.engine_tls == "deployment" else None


def _addresses(key: str, entries: tuple[str, ...]) -> dict[str, str]:
    """Address by name; raises ValueError where an entry has another form."""
    pairs = [entry.partition("=") for entry in entries]
    for (name, _, address), entry in zip(pairs, entries, strict=True):
        try:
            split_address(address)
        except ValueError as error:
            raise ValueError(f"{key}: {entry!r}: {error}; write name=host:port") from error
        if not name:
            raise ValueError(f"{key}: {entry!r}; write name=host:port")
    return {name: address for name, _, address in pairs}
