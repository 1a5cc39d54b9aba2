"""Settings of `prfaas-manager`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from prfaas.config import setting
from prfaas.config_checks import (
    ABSENT,
    GIVEN,
    check_addresses,
    check_apart,
    check_consent,
    check_socket_path,
    check_together,
    check_url,
)
from prfaas.scheduler.snapshot import LocalPolicy, OwnPolicy, WithoutPrefill
from prfaas.tracing import SETTING_DOC
from prfaas.transport.net.tls import Certificates
from prfaas.units import choice, show_seconds

Bandwidth = Literal["scarce", "abundant", "measured"]
RoleChanging = Literal["recommend", "apply"]
REDIS_SOCKET = "redis.sock"  # File name in the directory of the embedded Redis.
GRANT_SECONDS = 300.0  # Validity of a grant for a transfer.
_PLANNED = {"deployment": GIVEN}


@dataclass(frozen=True)
class ManagerConfig:
    """Settings of one manager."""

    REMOVED_SETTINGS: ClassVar[dict[str, str]] = {
        "forget_seconds": "blocks of a silent node are forgotten after 30 minutes, or after expiry_seconds if that is longer",
        "lease_seconds": "the lease of a cluster's record lasts 5 seconds",
        "stop_seconds": "calls under way get 5 seconds at the stop",
        "session_seconds": "an idle session is remembered for an hour",
        "plan_dead_band": "a threshold that differs by a tenth or less is not adopted",
        "role_change_gain": "the other split must sustain 5% more",
        "role_drain_seconds": "an instance drains for at most 2 minutes",
        "link_probe_seconds": "a path is probed again after 4 minutes at the earliest",
        "ppd_refresh_seconds": "turns of the last 10 minutes refresh the table",
        "ppd_mode": "Algorithm 1 of the paper decides",
        "ppd_ttft_weight": "set the weight in the table's file",
        "ppd_tpot_weight": "set the weight in the table's file",
        "grant_seconds": "a grant is valid for 5 minutes",
        "rebalance_node_bytes_per_second": "a node receives at most half of rebalance_bytes_per_second",
        "rebalance_hit_seconds": "each holder of a prefix serves one request per second",
        "rebalance_max_holders": "a hot prefix has at most 8 holders",
        "rebalance_repeat_seconds": "a node that evicted a prefix does not get it again for 5 minutes",
        "max_copies_per_caller": "a caller may have 1024 prefix copies under way",
    }

    name: str = setting("text", default="manager", doc="Name of this manager in logs and snapshots.")
    listen: str = setting("address", default="127.0.0.1:7410", doc="gRPC: agents, routers, command-line tools.")
    http_listen: str = setting(
        "address", default="127.0.0.1:7411", doc="HTTP: the dashboard, /metrics, /healthz, /readyz, /state, /digests."
    )
    engine_indexer: bool = setting(
        "flag",
        default=False,
        doc="Serve /register, /query and /query_by_hash (Mooncake RFC #1403). "
        "Callers can make this process connect to addresses of their choice.",
    )
    advertise: str = setting(
        "text",
        default="",
        doc="host:port at which agents of other machines reach `listen`. Empty: `listen` itself.",
    )
    secret_file: Path = setting("path", required=True, doc="File with the deployment's secret, at least 32 bytes.")
    operators: tuple[str, ...] = setting(
        "text_list",
        default=("operator",),
        doc="Names that may change the deployment (prfaas drain, prfaas flip). With TLS, names of client certificates.",
    )
    redis_url: str = setting(
        "text",
        default="",
        doc="redis://, rediss://, redis+sentinel://host:port,…/name or redis+cluster://host:port,…. "
        "Empty: the manager starts its own Redis.",
    )
    redis_directory: Path | None = setting(
        "path",
        default=None,
        only_where={"redis_url": ABSENT},
        doc="Data directory of the embedded Redis. Without it, a temporary directory that is removed at the stop.",
    )
    redis_namespace: str = setting("text", default="prfaas", doc="Prefix of every Redis key.")
    heartbeat_seconds: float = setting("seconds", default=10.0, minimum=0.05, doc="Period of the agents' heartbeats.")
    expiry_seconds: float = setting(
        "seconds", default=30.0, minimum=0.1, doc="A node that is silent for this long is left out of all answers."
    )
    threshold_tokens: int = setting(
        "tokens",
        default=16_000,
        maximum=(1 << 32) - 1,
        doc="Threshold t: prompts with more uncached tokens are prefilled by a PrfaaS cluster. "
        "With `deployment`, in force until there is a plan.",
    )
    deployment: Path | None = setting(
        "path",
        default=None,
        doc="YAML file of the deployment, as for prfaas-solve. The manager solves t from it, from the live instances and "
        "from the measured rates of the links. Needs the extra `solve`.",
    )
    plan_seconds: float = setting(
        "seconds",
        default=300.0,
        minimum=1.0,
        only_where=_PLANNED,
        doc="Longest time between two plans while nothing else changes.",
    )
    traffic_seconds: float = setting(
        "seconds",
        default=300.0,
        minimum=1.0,
        only_where=_PLANNED,
        doc="The plan uses the requests of this long, if managers see all requests (any local_policy but decode) "
        "and there were at least 50. Otherwise it uses the file's trace.",
    )
    role_changes: RoleChanging = setting(
        choice("recommend", "apply"),
        default="recommend",
        only_where=_PLANNED,
        doc="If another role of a PD instance would sustain more requests: log it (recommend), "
        "or drain the instance and change its role (apply).",
    )
    role_change_seconds: float = setting(
        "seconds",
        default=60.0,
        only_where=_PLANNED,
        doc="A role changes after another split was better, and its stage busy, for this long.",
    )
    link_probe_bytes: int = setting(
        "bytes",
        default=2 << 30,
        only_where=_PLANNED,
        doc="Most bytes of one probe of a link from a PrfaaS cluster to a PD cluster whose rate is unknown. 0: no probes.",
    )
    bandwidth: Bandwidth = setting(
        choice("scarce", "abundant", "measured"),
        default="scarce",
        doc="PrfaaS's rule for links between clusters. scarce: each cluster's cache counts on its own. abundant: the best "
        "cache anywhere counts, and a longer prefix elsewhere is fetched. measured: the plan decides.",
    )
    fetch_tokens: int = setting(
        "tokens",
        default=1024,
        only_where={"bandwidth": frozenset({"abundant", "measured"})},
        doc="A prefix elsewhere is fetched if it is longer by this many tokens.",
    )
    local_policy: LocalPolicy = setting(
        choice(*get_args(OwnPolicy), "endpoint_picker"),
        default="decode",
        doc="Who prefills a request that no PrfaaS cluster takes. decode: the decode instance. pd: a prefill instance of "
        "its cluster. ppd: PPD's table decides. static: a fixed share of later turns stays on the decode instance. "
        "suffix: the tokens that the decode node lacks decide. "
        "endpoint_picker: llm-d's configuration decides, and also chooses the decode instance.",
    )
    endpoint_picker: Path | None = setting(
        "path",
        default=None,
        only_where={"local_policy": "endpoint_picker"},
        doc="llm-d's EndpointPickerConfig, a YAML file.",
    )
    without_prefill: WithoutPrefill = setting(
        choice("local", "refuse"),
        default="local",
        doc="If no healthy prefill instance is there: the decode instance prefills (local), or the request is refused "
        "with 503 (refuse).",
    )
    local_turns_ratio: float = setting(
        "ratio",
        default=0.0,
        only_where={"local_policy": "static"},
        doc="PPD's static x: share of later turns that instances of role decode prefill themselves, the last by name "
        "first. Instances of role both prefill all that they decode.",
    )
    non_cached_tokens: int = setting(
        "tokens",
        default=16,
        only_where={"local_policy": "suffix"},
        doc="A decode node that lacks at least this many tokens does not prefill them.",
    )
    ppd_table: Path | None = setting(
        "path",
        default=None,
        only_where={"local_policy": "ppd"},
        doc="JSON file with PPD's decision table, in the form of its authors.",
    )
    max_transfer_bytes: int = setting("bytes", default=64 << 30, doc="Most KV of one transfer.")
    rebalance_bytes_per_second: float = setting(
        "rate",
        default=125_000_000.0,
        doc="Egress budget of each cluster for copies of hot prefixes to further nodes. 0Gbps: no copies.",
    )
    traces_endpoint: str = setting("text", default="", doc=SETTING_DOC)
    tls_authority: Path | None = setting(
        "path", default=None, doc="PEM file: authority of accepted client certificates."
    )
    tls_certificate: Path | None = setting("path", default=None, doc="PEM file: this manager's certificate.")
    tls_key: Path | None = setting("path", default=None, doc="PEM file: this manager's private key.")
    tls_revocations: Path | None = setting(
        "path",
        default=None,
        only_where={"tls_authority": GIVEN},
        doc="PEM file: the authority's revocation list. Revoked certificates are refused.",
    )
    insecure_plaintext: bool = setting(
        "flag",
        default=False,
        doc="Listen beyond loopback unencrypted: calls need only the secret, and pages are open to all who reach them.",
    )

    def __post_init__(self) -> None:
        if self.advertise:
            check_addresses("advertise", [self.advertise])
        if self.redis_directory is not None:
            check_socket_path("redis_directory", self.redis_directory / REDIS_SOCKET)
        if self.expiry_seconds <= self.heartbeat_seconds:
            raise ValueError(
                f"expiry_seconds: {show_seconds(self.expiry_seconds)}; write more than heartbeat_seconds, which is "
                f"{show_seconds(self.heartbeat_seconds)}: live nodes would expire"
            )
        if self.traces_endpoint:
            check_url("traces_endpoint", self.traces_endpoint, such_as="http://host:4318")
        if self.local_policy == "ppd" and self.ppd_table is None:
            raise ValueError("ppd_table: missing; local_policy: ppd needs it")
        if self.local_policy == "endpoint_picker" and self.endpoint_picker is None:
            raise ValueError("endpoint_picker: missing; local_policy: endpoint_picker needs it")
        if self.bandwidth == "measured" and self.deployment is None:
            raise ValueError("deployment: missing; bandwidth: measured needs a plan")
        check_together(self, "tls_authority", "tls_certificate", "tls_key")
        check_consent(self, "listen", "http_listen")
        check_apart(self, "listen", "http_listen")

    def certificates(self, *, speaks: tuple[str, ...]) -> Certificates | None:
        """Return the certificates of the listeners, or None for plain text.

        Raises:
            ConfigError: they cannot be used.
        """
        return Certificates.of(self, speaks=speaks)
