"""What one run of the twin simulates, as YAML or flags give it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prfaas.cachepool.eviction import POLICIES
from prfaas.config import record, setting
from prfaas.solve.catalog import CASE_STUDY
from prfaas.units import choice

LOCAL_POLICIES = ("decode", "pd", "ppd", "suffix")
VARIANTS = ("prfaas-pd", "homogeneous-pd", "naive-heterogeneous-pd")


@dataclass(frozen=True)
class GoodputSection:
    """What a request must meet to count as good; nothing is asked for where empty."""

    ttft: float | None = setting("seconds", default=None, doc="Time to first token at most.")
    ttft_per_thousand: float | None = setting(
        "seconds", default=None, doc="Time to first token at most, for each started 1,000 prompt tokens."
    )
    tpot: float | None = setting("seconds", default=None, doc="Mean time per further token at most.")


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
    threshold: int | None = setting("tokens", default=None, doc="t in uncached tokens; the best one when empty.")
    prefill_instances: int | None = setting("count", default=None, doc="N_p; the best one when empty.")
    trace: str = setting("text", default="", doc="The traffic, as prfaas-solve takes it; the deployment's when empty.")
    arrivals: str = setting(
        "text",
        default="poisson",
        doc='"poisson", "gamma:cv=3", "onoff:on=10s,off=30s", "diurnal:period=1h,depth=0.5", "trace" for its timestamps.',
    )
    load: str = setting(
        "text", default="80%", doc='Arrivals: a share of the exact capacity, also above 1 ("1.2"), or "2.5req/s".'
    )
    requests: int = setting("count", default=20_000, minimum=2, doc="How many arrive.")
    seed: int = setting("count", default=0, doc="Of everything that is drawn.")
    layers: int = setting(
        "count", default=1, minimum=1, doc="Layers that leave one by one while prefill computes; 1 sends KV afterwards."
    )
    rtt: float = setting("seconds", default=0.0, doc="Round trip between the clusters.")
    first_token_steps: int = setting(
        "count", default=1, doc="Decode steps until the first token; 0 is the paper's account: prefill makes it."
    )
    fidelity: str = setting(
        choice("stations", "instances"),
        default="stations",
        doc="stations: pools of servers. instances: engines with continuous batching and caches, routed one by one.",
    )
    local_policy: str = setting(
        choice(*LOCAL_POLICIES),
        default="pd",
        doc="instances: what prefills within the PD cluster, as managers take it.",
    )
    shared: bool = setting(
        "flag",
        default=False,
        doc="instances: those of the PD cluster prefill and decode at the same time (RAPID-Serve).",
    )
    non_cached_tokens: int = setting(
        "tokens", default=0, doc="instances, suffix: the least uncached part that a PD-P takes."
    )
    ppd_table: Path | None = setting("path", default=None, doc="instances, ppd: the table as JSON.")
    chunk_tokens: int | None = setting(
        "tokens",
        default=None,
        doc="instances: tokens that an iteration of a decode instance takes; whole prompts when empty.",
    )
    cache_tokens: int | None = setting(
        "tokens", default=None, minimum=1, doc="instances: what a node's cache holds; 65,536 blocks when empty."
    )
    block_tokens: int = setting("tokens", default=512, minimum=1, doc="instances: tokens of a block of the cache.")
    eviction: str = setting(choice(*POLICIES), default="lru", doc="instances: what leaves a full cache first.")
    announce: float = setting(
        "seconds", default=0.0, doc="instances: how much later the router knows of a cache's change."
    )
    turns: str = setting(
        "text", default="", doc='instances: conversations, new>output tokens of each turn: "1024>256,64>256".'
    )
    conversations: Path | None = setting(
        "path", default=None, doc="instances: conversations of a file, ShareGPT's JSON or WildChat's JSON lines."
    )
    think: float = setting("seconds", default=0.0, doc="instances: from an answer to the conversation's next turn.")
    outages: str = setting(
        "text", default="", doc='instances: who dies when, for how long: "h20-003@2m+30s, h200-000@5m+1m".'
    )
    heartbeats: float = setting("seconds", default=5.0, doc="instances: how long a death goes unnoticed.")
    role_changes: str = setting(
        "text",
        default="",
        doc='instances: who drains when, its new role, how long that takes: "h20-003@2m=decode+30s".',
    )
    warmup: float = setting("ratio", default=0.1, maximum=0.9, doc="Share of the requests that is not counted.")
    timeout: float | None = setting("seconds", default=None, doc="A request that takes longer has failed.")
    goodput: GoodputSection = setting(record(GoodputSection), doc="Service-level objectives.")
