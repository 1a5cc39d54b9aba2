"""Scenario: settings of one run of the twin, from YAML, flags or the environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from prfaas.config import record, setting
from prfaas.sim.model.request import SimulatedRequest
from prfaas.solve.files.catalog import CASE_STUDY
from prfaas.units import choice

DEFAULT_LOAD = "80%"
# Shorter prompts than a block find no prefix; the largest blocks of engines are some thousand tokens.
MAX_BLOCK_TOKENS = 1 << 14
LOCAL_POLICIES = ("decode", "pd", "ppd", "static", "endpoint_picker")
_STATIONS = {"fidelity": "stations"}
_INSTANCES = {"fidelity": "instances"}
_SHARED = _INSTANCES | {"shared": True}
_APART = _INSTANCES | {"shared": False}
_PPD = _INSTANCES | {"local_policy": "ppd"}
_STATIC = _INSTANCES | {"local_policy": "static"}
_PICKER = _INSTANCES | {"local_policy": "endpoint_picker"}
VARIANTS = ("prfaas-pd", "homogeneous-pd", "naive-heterogeneous-pd")


@dataclass(frozen=True)
class GoodputSection:
    """Objectives that a request must meet to count as good; an empty one is no bound."""

    ttft: float | None = setting("seconds", default=None, minimum=1e-6, doc="Longest time to first token.")
    tpot: float | None = setting("seconds", default=None, minimum=1e-6, doc="Longest mean time per further token.")
    itl: float | None = setting("seconds", default=None, minimum=1e-6, doc="Largest P95 of a request's gaps.")

    def met(self, request: SimulatedRequest) -> bool:
        """Return whether a request that ended meets all of them."""
        if self.ttft is not None and request.ttft > self.ttft:
            return False
        if self.tpot is not None and request.tpot > self.tpot:
            return False
        return self.itl is None or request.gap_quantile(0.95) <= self.itl


@dataclass(frozen=True)
class Scenario:
    """Deployment, plan, traffic and measurement of one run."""

    REMOVED_SETTINGS: ClassVar[Mapping[str, str]] = {
        "link_loss": "give as bandwidth what the link carries",
        "connections": "give as bandwidth what the link carries",
        "congestion_control": "give as bandwidth what the link carries",
        "cross_traffic": "write the times of reduced egress in link_changes",
        "method": "t and N_p come from exact expectations",
        "non_cached_tokens": "the policy suffix is gone; use pd",
        "preemption": "engines preempt where memory is full, as vLLM does",
    }

    deployment: str = setting("text", default=CASE_STUDY, doc="A catalogued deployment or a file as for prfaas-solve.")
    variant: str = setting(
        choice(*VARIANTS), default="prfaas-pd", doc="The deployment itself, or a deployment to compare with."
    )
    threshold: int | None = setting(
        "tokens", default=None, only_where={"variant": "prfaas-pd"}, doc="t in uncached tokens; empty: the best."
    )
    prefill_instances: int | None = setting("count", default=None, doc="N_p; empty: the best.")
    trace: str = setting("text", default="", doc="Traffic in a form of prfaas-solve; empty: the deployment's.")
    arrivals: str = setting(
        "text",
        default="poisson",
        doc='"poisson", "gamma:cv=3", "diurnal:period=1h,depth=0.5", "trace" for its timestamps.',
    )
    load: str = setting(
        "text",
        default=DEFAULT_LOAD,
        doc='Arrivals: share of the exact capacity, such as "80%" or "1.2", or "2.5req/s".',
    )
    requests: int = setting("count", default=20_000, minimum=2, doc="Number of arrivals.")
    seed: int = setting("count", default=0, doc="Seed of all random numbers.")
    layers: int = setting("count", default=1, minimum=1, doc="Layers whose KV leaves during prefill; 1: after prefill.")
    rtt: float = setting("seconds", default=0.0, doc="Round trip between the clusters.")
    link_changes: str = setting(
        "text",
        default="",
        only_where=_INSTANCES,
        doc='Reduced egress by cluster: "h200@5m=30%+2m"; 0%: links are down.',
    )
    congestion: bool = setting(
        "flag", default=False, only_where=_INSTANCES, doc="Raise t while egress is congested, as managers do."
    )
    hedge: bool = setting(
        "flag",
        default=False,
        only_where=_INSTANCES,
        doc="Compute a prompt locally when its KV would come later than a local prefill ends, as decode engines do.",
    )
    first_token_steps: int = setting(
        "count", default=1, only_where=_STATIONS, doc="Decode steps until the first token; 0: prefill makes it."
    )
    fidelity: str = setting(
        choice("stations", "instances"),
        default="stations",
        doc="Stations: pools of servers. Instances: engines with continuous batching and caches, routed one by one.",
    )
    local_policy: str = setting(
        choice(*LOCAL_POLICIES), default="pd", only_where=_APART, doc="Policy within the PD cluster, as for managers."
    )
    shared: bool = setting(
        "flag", default=False, only_where=_INSTANCES, doc="PD instances prefill and decode at once (RAPID-Serve)."
    )
    sharing_profile: Path | None = setting(
        "path",
        default=None,
        only_where=_SHARED,
        doc="Colocation profile; empty: the cluster's, else RAPID-Serve's speeds.",
    )
    ppd_table: Path | None = setting(
        "path", default=None, only_where=_PPD, doc="PPD table as JSON; it follows the turns served."
    )
    local_turns_ratio: float = setting(
        "ratio", default=0.0, only_where=_STATIC, doc="Share of later turns that decode instances prefill."
    )
    endpoint_picker: Path | None = setting(
        "path", default=None, only_where=_PICKER, doc="EndpointPickerConfig of llm-d; empty: its default."
    )
    role_policy: bool = setting(
        "flag", default=False, only_where=_APART, doc="Change roles towards the best N_p under load, as managers do."
    )
    rebalance: float = setting(
        "rate", default=0.0, only_where=_INSTANCES, doc="Egress of a cluster for copies of hot prefixes."
    )
    chunk_tokens: int | None = setting(
        "tokens", default=None, minimum=1, only_where=_INSTANCES, doc="Tokens per iteration; empty: whole prompts."
    )
    kv_tokens: int | None = setting(
        "tokens", default=None, minimum=1, only_where=_INSTANCES, doc="KV memory of a PD engine; empty: the profile's."
    )
    cache_tokens: int | None = setting(
        "tokens", default=None, minimum=1, only_where=_INSTANCES, doc="Cache of a node; empty: 65,536 blocks."
    )
    block_tokens: int = setting(
        "tokens",
        default=512,
        minimum=1,
        maximum=MAX_BLOCK_TOKENS,
        only_where=_INSTANCES,
        doc="Tokens of a cache block.",
    )
    announce: float = setting(
        "seconds", default=0.0, only_where=_INSTANCES, doc="Delay until the router learns of a cache's change."
    )
    turns: str = setting(
        "text", default="", only_where=_INSTANCES, doc='Conversations, new>output tokens per turn: "1024>256,64>256".'
    )
    conversations: Path | None = setting(
        "path", default=None, only_where=_INSTANCES, doc="Conversations as ShareGPT's JSON or WildChat's JSON lines."
    )
    think: float = setting(
        "seconds", default=0.0, only_where=_INSTANCES, doc="Pause between an answer and the next turn."
    )
    outages: str = setting(
        "text", default="", only_where=_INSTANCES, doc='Deaths: "h20-003@2m+30s, h200-000@5m+1m" (start, duration).'
    )
    heartbeats: float = setting(
        "seconds", default=5.0, only_where=_INSTANCES, doc="Delay until a death or a link that is down is noticed."
    )
    role_changes: str = setting(
        "text", default="", only_where=_APART, doc='Role changes: "h20-003@2m=decode+30s" (start, role, duration).'
    )
    warmup: float = setting("ratio", default=0.1, maximum=0.9, doc="Share of the first requests that is not counted.")
    timeout: float | None = setting("seconds", default=None, minimum=1e-6, doc="Longer requests have failed.")
    goodput: GoodputSection = setting(record(GoodputSection), doc="Service-level objectives.")

    def __post_init__(self) -> None:
        if self.arrivals == "trace" and not self.trace:
            raise ValueError("arrivals: trace needs trace, a file with timestamps")
        if self.arrivals == "trace" and self.load != DEFAULT_LOAD:
            raise ValueError("load: a trace arrives at its own times")
        if self.local_policy == "ppd" and self.ppd_table is None:
            raise ValueError("local_policy: ppd needs ppd_table")
        if self.think and not (self.turns or self.conversations):
            raise ValueError("think: needs turns or conversations")
