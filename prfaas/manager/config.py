"""Settings of `prfaas-manager`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from prfaas.config import record, setting
from prfaas.config_checks import (
    ABSENT,
    GIVEN,
    check_addresses,
    check_apart,
    check_consent,
    check_socket_path,
    check_tls,
    check_url,
)
from prfaas.tracing import SETTING_DOC
from prfaas.transport.net.tls import TLS_DOC, TlsConfig
from prfaas.types import LocalPolicy, OwnPolicy
from prfaas.units import choice

Bandwidth = Literal["scarce", "abundant", "measured"]
RoleChanging = Literal["recommend", "apply"]
REDIS_SOCKET = "redis.sock"  # File name in the directory of the embedded Redis.
SILENCE_SECONDS = 2.0
GRANT_SECONDS = 300.0  # Validity of a grant for a transfer.
_PLANNED = {"deployment": GIVEN}


@dataclass(frozen=True)
class ManagerConfig:
    """Settings of one manager."""

    REMOVED_SETTINGS: ClassVar[dict[str, str]] = {
        "non_cached_tokens": "write nonCachedTokens of the prefix-based-pd-decider in the file of endpoint_picker",
        "without_prefill": "without a healthy prefill instance the decode instance prefills",
        "heartbeat_seconds": "agents send four heartbeats within silence_seconds",
        "engine_indexer": "ask Match over gRPC",
        "traffic_seconds": "a plan uses the requests of the last plan_seconds, at least 30 seconds",
        "forget_seconds": "blocks of a silent node are forgotten after 30 minutes, or after expiry_seconds if that is longer",
        "lease_seconds": "the lease of a cluster's record lasts 5 seconds",
        "stop_seconds": "calls in progress get 5 seconds at the stop",
        "session_seconds": "an idle session is remembered for an hour",
        "plan_dead_band": "a threshold that differs by a tenth or less is not adopted",
        "role_change_gain": "the other split must sustain 5% more",
        "role_drain_seconds": "an instance drains for at most 2 minutes",
        "link_probe_seconds": "transfers show what a link carries, and the deployment file says it before",
        "link_probe_bytes": "transfers show what a link carries, and the deployment file says it before",
        "ppd_refresh_seconds": "turns of the last 10 minutes refresh the table",
        "ppd_mode": "Algorithm 1 of the paper decides",
        "ppd_ttft_weight": "set the weight in the table's file",
        "ppd_tpot_weight": "set the weight in the table's file",
        "grant_seconds": "a grant is valid for 5 minutes",
        "rebalance_node_bytes_per_second": "a node receives at most half of rebalance_bytes_per_second",
        "rebalance_hit_seconds": "each holder of a prefix serves one request per second",
        "rebalance_max_holders": "a hot prefix has at most 8 holders",
        "rebalance_repeat_seconds": "a node that evicted a prefix does not get it again for 5 minutes",
        "max_copies_per_caller": "a caller may have 1024 prefix copies in progress",
        "max_transfer_bytes": "a transfer may bring 64 GiB",
    }

    name: str = setting("text", default="manager", doc="Name of this manager in logs and snapshots.")
    listen: str = setting("address", default="127.0.0.1:7410", doc="gRPC: agents, routers, command-line tools.")
    http_listen: str = setting(
        "address", default="127.0.0.1:7411", doc="HTTP: the dashboard, /metrics, /healthz, /readyz, /state, /digests."
    )
    advertise: str = setting(
        "text", default="", doc="host:port of `listen` for agents of other machines; empty: `listen` itself."
    )
    secret_file: Path = setting("path", required=True, doc="File with the deployment's secret, at least 32 bytes.")
    operators: tuple[str, ...] = setting(
        "text_list",
        default=("operator",),
        doc="Names that may change the deployment; with TLS, names of client certificates.",
    )
    redis_url: str = setting(
        "text", default="", doc="redis://, rediss:// or redis+sentinel://host:port,…/name; empty: an embedded Redis."
    )
    redis_directory: Path | None = setting(
        "path",
        default=None,
        only_where={"redis_url": ABSENT},
        doc="Data directory of the embedded Redis; empty: temporary.",
    )
    redis_namespace: str = setting("text", default="prfaas", doc="Prefix of every Redis key.")
    silence_seconds: float = setting(
        "seconds",
        default=SILENCE_SECONDS,
        minimum=0.1,
        doc="Silence of an agent or engine after which it gets no new requests until it answers.",
    )
    expiry_seconds: float = setting(
        "seconds", default=30.0, minimum=0.1, doc="Silence after which a node is left out of all answers."
    )
    threshold_tokens: int = setting(
        "tokens",
        default=16_000,
        maximum=(1 << 32) - 1,
        doc="Threshold t: a PrfaaS cluster prefills prompts with more uncached tokens. A plan takes precedence.",
    )
    deployment: Path | None = setting(
        "path", default=None, doc="YAML file of the deployment, as for prfaas-solve, for plans. Extra `site`."
    )
    plan_seconds: float = setting(
        "seconds",
        default=300.0,
        minimum=1.0,
        only_where=_PLANNED,
        doc="Longest time between two plans, which is also the period of requests behind a plan.",
    )
    role_changes: RoleChanging = setting(
        choice("recommend", "apply"),
        default="recommend",
        only_where=_PLANNED,
        doc="A better role of a PD instance: logged (recommend), or applied after a drain (apply).",
    )
    role_change_seconds: float = setting(
        "seconds",
        default=60.0,
        only_where=_PLANNED,
        doc="Time for which another split is better, and its stage busy, before a change.",
    )
    bandwidth: Bandwidth = setting(
        choice("scarce", "abundant", "measured"),
        default="scarce",
        doc="Caches behind a route: each cluster's own (scarce), the best anywhere (abundant), as planned (measured).",
    )
    fetch_tokens: int = setting(
        "tokens",
        default=1024,
        only_where={"bandwidth": frozenset({"abundant", "measured"})},
        doc="Advantage in tokens from which a longer prefix elsewhere is fetched.",
    )
    local_policy: LocalPolicy = setting(
        choice(*get_args(OwnPolicy), "endpoint_picker"),
        default="decode",
        doc="Prefill that no PrfaaS cluster takes: decode or prefill (pd) instance, or a policy (docs/router.md).",
    )
    endpoint_picker: Path | None = setting(
        "path",
        default=None,
        only_where={"local_policy": "endpoint_picker"},
        doc="llm-d's EndpointPickerConfig, a YAML file.",
    )
    local_turns_ratio: float = setting(
        "ratio",
        default=0.0,
        only_where={"local_policy": "static"},
        doc="PPD's static x: share of later turns that decode instances prefill themselves.",
    )
    ppd_table: Path | None = setting(
        "path",
        default=None,
        only_where={"local_policy": "ppd"},
        doc="JSON file with PPD's decision table, in its authors' form.",
    )
    rebalance_bytes_per_second: float = setting(
        "rate", default=125_000_000.0, doc="Egress budget of each cluster for copies of hot prefixes; 0Gbps: no copies."
    )
    traces_endpoint: str = setting("text", default="", doc=SETTING_DOC)
    tls: TlsConfig = setting(record(TlsConfig), formerly=("tls_*",), doc=TLS_DOC)
    insecure_plaintext: bool = setting(
        "flag", default=False, doc="Unencrypted listeners beyond loopback: calls need only the secret, pages nothing."
    )

    def __post_init__(self) -> None:
        if self.advertise:
            check_addresses("advertise", [self.advertise])
        if self.redis_directory is not None:
            check_socket_path("redis_directory", self.redis_directory / REDIS_SOCKET)
        if self.traces_endpoint:
            check_url("traces_endpoint", self.traces_endpoint, such_as="http://host:4318")
        if self.local_policy == "ppd" and self.ppd_table is None:
            raise ValueError("ppd_table: missing; local_policy: ppd needs it")
        if self.local_policy == "endpoint_picker" and self.endpoint_picker is None:
            raise ValueError("endpoint_picker: missing; local_policy: endpoint_picker needs it")
        if self.bandwidth == "measured" and self.deployment is None:
            raise ValueError("deployment: missing; bandwidth: measured needs a plan")
        check_tls(self)
        check_consent(self, "listen", "http_listen")
        check_apart(self, "listen", "http_listen")
