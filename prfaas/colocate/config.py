"""Every setting of `prfaas-colocate serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prfaas.config import setting


@dataclass(frozen=True)
class ColocateConfig:
    """One device that prefills and decodes at once."""

    listen: str = setting(
        "address", default="127.0.0.1:8200", doc="HTTP: /v1/completions, /v1/models, /healthz, /status."
    )
    shape: str = setting(
        "text", default="small", doc="The model's sizes: tiny, small or hybrid-8b; weights are random."
    )
    seed: int = setting("count", default=1, doc="Seed of the weights; equal seeds give equal answers on equal devices.")
    served_model_name: str = setting("text", default="prfaas-hybrid", doc="The model's name in requests.")
    device: str = setting("text", default="cpu", doc="cpu or cuda.")
    dtype: str = setting("text", default="float32", doc="Of weights and KV: float64, float32 or bfloat16.")
    num_blocks: int = setting("count", default=512, minimum=2, doc="KV blocks; one is scratch.")
    block_tokens: int = setting("count", default=16, minimum=1, doc="Tokens of a KV block.")
    max_rows: int = setting("count", default=64, minimum=1, doc="Requests in a decode batch.")
    max_requests: int = setting("count", default=128, minimum=1, doc="Requests that hold KV; those beyond wait.")
    max_tokens: int = setting("tokens", default=4096, doc="Longest prompt and answer together.")
    num_threads: int = setting("count", default=0, doc="Threads of each side on a CPU; 0 is one per core.")
    partition: str = setting(
        "text", default="none", doc="How compute is shared: none, affinity (CPU), green_contexts, mps or cu_masks."
    )
    mps_decode_share: float = setting("ratio", default=0.4, doc="With mps: decode's fixed share; prefill has the rest.")
    profile: str = setting("path", default="", doc="Profile (YAML); with it and a partition, shares adapt to the SLO.")
    itl_slo_seconds: float = setting("seconds", default=0.05, doc="What a decode step may take.")
    agent_socket: Path | None = setting(
        "path", default=None, doc="Unix socket of this machine's prfaas-agent; without one nothing is cached or sent."
    )
    tenant: str = setting(
        "text", default="", doc="Salt of the hashes of requests that name no tenant; equal to the routers' `tenant`."
    )
    reuse_min_tokens: int = setting(
        "tokens", default=256, doc="Prompts and answers shorter than this are neither looked up nor left in the pool."
    )
    dwell_steps: int = setting("count", default=16, minimum=1, doc="Steps before decode's share shrinks.")
