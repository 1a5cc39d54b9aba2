"""What one run of the twin simulates, as YAML or flags give it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prfaas.cachepool.eviction import POLICIES
from prfaas.config import record, setting
from prfaas.config_checks import GIVEN
from prfaas.solve.files.catalog import CASE_STUDY
from prfaas.units import choice

DEFAULT_LOAD = "80%"
MAX_BLOCK_TOKENS = (
    1 << 14
)  # prompts shorter than a block find no prefix; engines' largest blocks are some thousand tokens
LOCAL_POLICIES = ("decode", "pd", "ppd", "suffix")
_STATIONS = {"fidelity": "stations"}
_LOSSY = {"link_loss": GIVEN}
_INSTANCES = {"fidelity": "instances"}
_SHARED = _INSTANCES | {"shared": True}
_APART = _INSTANCES | {"shared": False}
_SUFFIX = _INSTANCES | {"local_policy": "suffix"}
_PPD = _INSTANCES | {"local_policy": "ppd"}
VARIANTS = ("prfaas-pd", "homogeneous-pd", "naive-heterogeneous-pd")


@dataclass(frozen=True)
class GoodputSection:
    """What a request must meet to count as good; nothing is asked for where empty."""

    ttft: float | None = setting("seconds", default=None, minimum=1e-6, doc="Time to first token at most.")
    ttft_per_thousand: float | None = setting(
        "seconds", default=None, minimum=1e-6, doc="Time to first token at most, for each started 1,000 prompt tokens."
    )
    tpot: float | None = setting("seconds", default=None, minimum=1e-6, doc="Mean time per further token at most.")
    itl: float | None = setting(
        "seconds", default=None, minimum=1e-6, doc="P95 of a request's own gaps between tokens at most."
    )
    attained: float = setting(
        "ratio", default=0.0, doc="Share of the requests that must meet all of this: with fewer of them goodput is 0."
    )


@dataclass(frozen=True)
class Scenario:
    """A deployment, its plan, its traffic and what is counted."""

    deployment: str = setting(
        "text", default=CASE_STUDY, doc="A catalogued deployment or a file as prfaas-solve takes."
    )
    variant: str = setting(
        choice(*VARIANTS), default="prfaas-pd", doc="The deployment itself, or what it is compared with."
    )
    method: str = setting(choice("paper", "exact"), default="exact", doc="The equations that t and N_p come from.")
    threshold: int | None = setting(
        "tokens",
        default=None,
        only_where={"variant": "prfaas-pd"},
        doc="t in uncached tokens; the best one when empty.",
    )
    prefill_instances: int | None = setting("count", default=None, doc="N_p; the best one when empty.")
    trace: str = setting("text", default="", doc="The traffic, as prfaas-solve takes it; the deployment's when empty.")
    arrivals: str = setting(
        "text",
        default="poisson",
        doc='"poisson", "gamma:cv=3", "onoff:on=10s,off=30s", "diurnal:period=1h,depth=0.5", "trace" for its timestamps.',
    )
    load: str = setting(
        "text",
        default=DEFAULT_LOAD,
        doc='Arrivals: a share of the exact capacity, also above 1 ("1.2"), or "2.5req/s".',
    )
    requests: int = setting("count", default=20_000, minimum=2, doc="How many arrive.")
    seed: int = setting("count", default=0, doc="Of everything that is drawn.")
    layers: int = setting(
        "count", default=1, minimum=1, doc="Layers that leave one by one while prefill computes; 1 sends KV afterwards."
    )
    rtt: float = setting("seconds", default=0.0, doc="Round trip between the clusters.")
    link_loss: float | None = setting(
        "ratio", default=None, maximum=0.5, doc="Packets that the links between clusters lose, one by one."
    )
    connections: int = setting("count", default=8, minimum=1, only_where=_LOSSY, doc="TCP connections of a link.")
    congestion_control: str = setting(
        choice("bbr", "cubic"),
        default="bbr",
        only_where=_LOSSY,
        doc="Of these connections; cubic takes each loss for a queue.",
    )
    link_changes: str = setting(
        "text",
        default="",
        only_where=_INSTANCES,
        doc='Whose egress carries a share of its rate, when, for how long: "h200@5m=30%+2m", 0%: down.',
    )
    cross_traffic: str = setting(
        "text",
        default="",
        only_where=_INSTANCES,
        doc='What others send over the same egress: "on=5s,off=20s,share=50%".',
    )
    congestion: bool = setting(
        "flag",
        default=False,
        only_where=_INSTANCES,
        doc="The threshold rises while egress is congested, as managers raise it.",
    )
    first_token_steps: int = setting(
        "count",
        default=1,
        only_where=_STATIONS,
        doc="Decode steps until the first token; 0 is the paper's account: prefill makes it.",
    )
    fidelity: str = setting(
        choice("stations", "instances"),
        default="stations",
        doc="Stations: pools of servers. Instances: engines with continuous batching and caches, routed one by one.",
    )
    local_policy: str = setting(
        choice(*LOCAL_POLICIES),
        default="pd",
        only_where=_APART,
        doc="What prefills within the PD cluster, as managers take it.",
    )
    shared: bool = setting(
        "flag",
        default=False,
        only_where=_INSTANCES,
        doc="Those of the PD cluster prefill and decode at the same time (RAPID-Serve).",
    )
    sharing_profile: Path | None = setting(
        "path",
        default=None,
        only_where=_SHARED,
        doc="How fast both sides are, as prfaas-colocate profile measured it; RAPID-Serve's when empty.",
    )
    non_cached_tokens: int = setting(
        "tokens", default=0, only_where=_SUFFIX, doc="The least uncached part that a PD-P takes."
    )
    ppd_table: Path | None = setting("path", default=None, only_where=_PPD, doc="The table as JSON.")
    chunk_tokens: int | None = setting(
        "tokens",
        default=None,
        minimum=1,
        only_where=_INSTANCES,
        doc="Tokens that an iteration of a decode instance takes; whole prompts when empty.",
    )
    kv_tokens: int | None = setting(
        "tokens",
        default=None,
        minimum=1,
        only_where=_INSTANCES,
        doc="What a PD engine's KV memory holds, the longest request at least; the profile's when empty.",
    )
    preemption: bool = setting(
        "flag",
        default=True,
        only_where=_INSTANCES,
        doc="Who joined last gives its KV up when memory is full; else memory is reserved to a request's end.",
    )
    cache_tokens: int | None = setting(
        "tokens",
        default=None,
        minimum=1,
        only_where=_INSTANCES,
        doc="What a node's cache holds; 65,536 blocks when empty.",
    )
    block_tokens: int = setting(
        "tokens",
        default=512,
        minimum=1,
        maximum=MAX_BLOCK_TOKENS,
        only_where=_INSTANCES,
        doc="Tokens of a block of the cache.",
    )
    eviction: str = setting(
        choice(*POLICIES), default="lru", only_where=_INSTANCES, doc="What leaves a full cache first."
    )
    announce: float = setting(
        "seconds", default=0.0, only_where=_INSTANCES, doc="How much later the router knows of a cache's change."
    )
    turns: str = setting(
        "text",
        default="",
        only_where=_INSTANCES,
        doc='Conversations, new>output tokens of each turn: "1024>256,64>256".',
    )
    conversations: Path | None = setting(
        "path",
        default=None,
        only_where=_INSTANCES,
        doc="Conversations of a file, ShareGPT's JSON or WildChat's JSON lines.",
    )
    think: float = setting(
        "seconds", default=0.0, only_where=_INSTANCES, doc="From an answer to the conversation's next turn."
    )
    outages: str = setting(
        "text", default="", only_where=_INSTANCES, doc='Who dies when, for how long: "h20-003@2m+30s, h200-000@5m+1m".'
    )
    heartbeats: float = setting(
        "seconds", default=5.0, only_where=_INSTANCES, doc="How long a death, or a link that is down, goes unnoticed."
    )
    role_changes: str = setting(
        "text",
        default="",
        only_where=_APART,
        doc='Who drains when, its new role, how long that takes: "h20-003@2m=decode+30s".',
    )
    warmup: float = setting("ratio", default=0.1, maximum=0.9, doc="Share of the requests that is not counted.")
    timeout: float | None = setting(
        "seconds", default=None, minimum=1e-6, doc="A request that takes longer has failed."
    )
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
