"""Every setting of `prfaas-manager`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

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
from prfaas.scheduler.ppd import PpdMode
from prfaas.scheduler.snapshot import LocalPolicy, OwnPolicy, WithoutPrefill
from prfaas.tracing import SETTING_DOC
from prfaas.transport.net.tls import Certificates
from prfaas.units import choice, show_seconds

Bandwidth = Literal["scarce", "abundant", "measured"]
RoleChanging = Literal["recommend", "apply"]
REDIS_SOCKET = "redis.sock"  # of the embedded Redis, in its directory
_PLANNED = {"deployment": GIVEN}
_PPD = {"local_policy": "ppd"}


@dataclass(frozen=True)
class ManagerConfig:
    """One manager."""

    name: str = setting("text", default="manager", doc="Name of this manager in logs and snapshots.")
    listen: str = setting("address", default="127.0.0.1:7410", doc="gRPC: agents, routers, command-line tools.")
    http_listen: str = setting(
        "address", default="127.0.0.1:7411", doc="HTTP: the dashboard, /metrics, /healthz, /readyz, /state, /digests."
    )
    engine_indexer: bool = setting(
        "flag",
        default=False,
        doc="Serve /register, /query and /query_by_hash (Mooncake RFC #1403): whoever posts makes this process connect.",
    )
    advertise: str = setting(
        "text",
        default="",
        doc="host:port at which agents of other machines reach `listen`; `listen` itself when empty.",
    )
    secret_file: Path = setting("path", required=True, doc="File with the deployment's secret, at least 32 bytes.")
    operators: tuple[str, ...] = setting(
        "text_list",
        default=("operator",),
        doc="Names that may change the deployment (prfaas drain, prfaas flip); with TLS those of their certificates.",
    )
    redis_url: str = setting(
        "text",
        default="",
        doc="redis://, rediss://, redis+sentinel://host:port,…/name or redis+cluster://host:port,…; "
        "when empty a Redis of its own is started.",
    )
    redis_directory: Path | None = setting(
        "path",
        default=None,
        only_where={"redis_url": ABSENT},
        doc="Where the embedded Redis keeps its data; when not given a temporary directory, which goes with the manager.",
    )
    redis_namespace: str = setting("text", default="prfaas", doc="First part of every Redis key.")
    heartbeat_seconds: float = setting(
        "seconds", default=10.0, minimum=0.05, doc="How often agents say that they live."
    )
    expiry_seconds: float = setting(
        "seconds", default=30.0, minimum=0.1, doc="Silent for so long, a node is in no answer any more."
    )
    forget_seconds: float = setting(
        "seconds", default=1800.0, minimum=1.0, doc="Silent for so long, a node's blocks are forgotten."
    )
    lease_seconds: float = setting(
        "seconds", default=5.0, minimum=0.2, doc="How long a manager may write a cluster's record without renewing."
    )
    stop_seconds: float = setting(
        "seconds",
        default=5.0,
        doc="How long calls and streams under way may take to end when the manager is told to stop.",
    )
    session_seconds: float = setting(
        "seconds", default=3600.0, minimum=1.0, doc="How long an idle conversation is remembered."
    )
    threshold_tokens: int = setting(
        "tokens",
        default=16_000,
        maximum=(1 << 32) - 1,
        doc="t: prompts with more uncached tokens are prefilled by a PrfaaS cluster. With `deployment`, until there is a plan.",
    )
    deployment: Path | None = setting(
        "path",
        default=None,
        doc="YAML file of the deployment, as prfaas-solve takes it: t is solved from it, the live instances and the links' "
        "measured rates. Needs the extra `solve`.",
    )
    plan_seconds: float = setting(
        "seconds",
        default=300.0,
        minimum=1.0,
        only_where=_PLANNED,
        doc="How often t is solved anew when nothing else has changed.",
    )
    plan_dead_band: float = setting(
        "ratio",
        default=0.1,
        only_where=_PLANNED,
        doc="A new t that differs from the one in force by no more than this share is not taken up.",
    )
    traffic_seconds: float = setting(
        "seconds",
        default=300.0,
        minimum=1.0,
        only_where=_PLANNED,
        doc="The requests of so long are the distribution that is planned for, where managers see them all (any "
        "local_policy but decode) and there were 50; otherwise the file's trace is.",
    )
    role_changes: RoleChanging = setting(
        choice("recommend", "apply"),
        default="recommend",
        only_where=_PLANNED,
        doc="An instance of a PD cluster whose other role would bring more is named in the log "
        "(recommend), or drained and given that role (apply).",
    )
    role_change_seconds: float = setting(
        "seconds",
        default=60.0,
        only_where=_PLANNED,
        doc="How long another split must have been better, and its stage busy, before a role changes.",
    )
    role_change_gain: float = setting(
        "ratio",
        default=0.05,
        only_where=_PLANNED,
        doc="By how much more the deployment must sustain with the other split.",
    )
    role_drain_seconds: float = setting(
        "seconds",
        default=120.0,
        only_where=_PLANNED | {"role_changes": "apply"},
        doc="The longest that an instance is drained; then it takes the role with what it still has.",
    )
    link_probe_bytes: int = setting(
        "bytes",
        default=2 << 30,
        only_where=_PLANNED,
        doc="Most bytes of one probe of a link from a PrfaaS cluster to a PD cluster whose rate nobody knows; 0: none.",
    )
    link_probe_seconds: float = setting(
        "seconds",
        default=240.0,
        minimum=60.0,
        only_where=_PLANNED,
        doc="The links from one cluster to another are not probed again sooner.",
    )
    bandwidth: Bandwidth = setting(
        choice("scarce", "abundant", "measured"),
        default="scarce",
        doc="Which of PrfaaS's two rules holds on the links between clusters: scarce (each cluster's cache counts on its own) "
        "abundant (the best cache anywhere counts; a longer prefix elsewhere is fetched), or measured: what the plan finds.",
    )
    fetch_tokens: int = setting(
        "tokens",
        default=1024,
        only_where={"bandwidth": frozenset({"abundant", "measured"})},
        doc="A prefix elsewhere that is so much longer is fetched.",
    )
    local_policy: LocalPolicy = setting(
        choice(*get_args(OwnPolicy), "endpoint_picker"),
        default="decode",
        doc="What prefills a request that no PrfaaS cluster takes: the decode instance, always a prefill instance of its "
        "cluster (pd), one or the other by PPD's table (ppd), by a fixed share of later turns (static), or by how "
        "many of its tokens the decode node lacks (suffix). "
        "endpoint_picker: as llm-d's configuration says, which then chooses the decode instance as well.",
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
        doc="A request that is to be prefilled elsewhere while no healthy instance is there to do it: its decode instance "
        "does (local), or it is refused with 503 (refuse).",
    )
    local_turns_ratio: float = setting(
        "ratio",
        default=0.0,
        only_where={"local_policy": "static"},
        doc="PPD's static x: the share of later turns that instances of role decode prefill themselves; those of the last "
        "of them by name first. Instances of role both prefill all that they decode.",
    )
    non_cached_tokens: int = setting(
        "tokens",
        default=16,
        only_where={"local_policy": "suffix"},
        doc="A decode node that lacks so many tokens does not prefill them.",
    )
    ppd_table: Path | None = setting(
        "path", default=None, only_where=_PPD, doc="JSON file with PPD's decision table, in the form of its authors."
    )
    ppd_refresh_seconds: float = setting(
        "seconds",
        default=600.0,
        only_where=_PPD,
        doc="Turns answered within so long take the place of the table's averages where there are enough of them; 0: never.",
    )
    ppd_mode: PpdMode = setting(
        choice("paper", "authors"),
        default="paper",
        only_where=_PPD,
        doc="Algorithm 1 of the paper, or the rules of its authors' engine (under 512 new tokens stay).",
    )
    ppd_ttft_weight: float | None = setting(
        "weight",
        default=None,
        only_where=_PPD,
        doc="w_ttft in place of the table's own; only the ratio of both counts.",
    )
    ppd_tpot_weight: float | None = setting(
        "weight", default=None, only_where=_PPD, doc="w_tpot in place of the table's own."
    )
    max_transfer_bytes: int = setting("bytes", default=64 << 30, doc="Most KV that one transfer may bring.")
    grant_seconds: float = setting("seconds", default=300.0, doc="How long a grant for a transfer holds.")
    rebalance_bytes_per_second: float = setting(
        "rate",
        default=125_000_000.0,
        doc="Egress budget of each cluster for copies of hot prefixes to further nodes; 0Gbps: none are made.",
    )
    rebalance_node_bytes_per_second: float = setting(
        "rate", default=62_500_000.0, doc="The most that such copies bring to one node, on average over ten seconds."
    )
    rebalance_hit_seconds: float = setting(
        "seconds",
        default=1.0,
        minimum=0.001,
        doc="A prefix that is asked for n times in so long is to be held by n nodes.",
    )
    rebalance_max_holders: int = setting("count", default=8, doc="The most nodes that hot prefixes are copied to.")
    rebalance_repeat_seconds: float = setting(
        "seconds", default=300.0, doc="A node that has evicted a prefix again is left alone for so long."
    )
    max_copies_per_caller: int = setting(
        "count",
        default=1024,
        minimum=1,
        doc="The most prefix copies that all routers, or one operator, may have under way; more are refused "
        "(too_many_copies).",
    )
    traces_endpoint: str = setting("text", default="", doc=SETTING_DOC)
    tls_authority: Path | None = setting("path", default=None, doc="PEM file: whose client certificates are accepted.")
    tls_certificate: Path | None = setting("path", default=None, doc="PEM file: this manager's certificate.")
    tls_key: Path | None = setting("path", default=None, doc="PEM file: this manager's private key.")
    tls_revocations: Path | None = setting(
        "path",
        default=None,
        only_where={"tls_authority": GIVEN},
        doc="PEM file: the authority's revocation list; whoever it names is refused.",
    )
    insecure_plaintext: bool = setting(
        "flag",
        default=False,
        doc="Listen beyond loopback unencrypted: calls with the secret alone, pages for everybody who reaches them.",
    )

    def __post_init__(self) -> None:
        if self.advertise:
            check_addresses("advertise", [self.advertise])
        if self.redis_directory is not None:
            check_socket_path("redis_directory", self.redis_directory / REDIS_SOCKET)
        if self.expiry_seconds <= self.heartbeat_seconds:
            raise ValueError(
                f"expiry_seconds: {show_seconds(self.expiry_seconds)}; write more than heartbeat_seconds, which is "
                f"{show_seconds(self.heartbeat_seconds)}: nodes that live would be taken for dead"
            )
        if self.forget_seconds < self.expiry_seconds:
            raise ValueError(
                f"forget_seconds: {show_seconds(self.forget_seconds)}; write at least expiry_seconds, which is "
                f"{show_seconds(self.expiry_seconds)}: nodes that still answer would be forgotten"
            )
        if self.traces_endpoint:
            check_url("traces_endpoint", self.traces_endpoint, such_as="http://host:4318")
        if self.local_policy == "ppd" and self.ppd_table is None:
            raise ValueError("ppd_table: missing; local_policy: ppd decides by it")
        if self.local_policy == "endpoint_picker" and self.endpoint_picker is None:
            raise ValueError("endpoint_picker: missing; local_policy: endpoint_picker decides by it")
        if self.bandwidth == "measured" and self.deployment is None:
            raise ValueError("deployment: missing; bandwidth: measured is decided by its plan")
        check_together(self, "tls_authority", "tls_certificate", "tls_key")
        check_consent(self, "listen", "http_listen")
        check_apart(self, "listen", "http_listen")

    def certificates(self, *, speaks: tuple[str, ...]) -> Certificates | None:
        """What listeners show and ask for; None: they speak plain text. Raises ConfigError when they cannot be used."""
        return Certificates.of(self, speaks=speaks)
