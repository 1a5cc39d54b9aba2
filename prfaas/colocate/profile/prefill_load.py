"""A prefill that never stops, in a process of its own: what a decode step is measured beside.

    python -m prfaas.colocate.profile.prefill_load SETTINGS_JSON
Prints the seconds of each prompt as it ends, and ends itself when its input closes.
"""

from __future__ import annotations

import json
import select
import sys
import time
from dataclasses import dataclass

import torch

from prfaas.colocate.device import devices
from prfaas.colocate.device.cpu import CpuSets
from prfaas.colocate.device.streams import streams_of
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.model.model import HybridModel, PromptPart


@dataclass(frozen=True)
class PrefillLoad:
    """`num_cached_tokens` of 0 is a full prefill; else an append-prefill behind that many tokens, filled in once."""

    shape: str
    dtype: str
    device: str
    partition: str
    share: float
    num_new_tokens: int
    num_cached_tokens: int = 0
    block_tokens: int = 16
    num_threads: int = 0


def prompt_parts(load: PrefillLoad) -> tuple[PromptPart | None, PromptPart]:
    """What to compute once, and what to compute again and again."""
    total = load.num_cached_tokens + load.num_new_tokens
    tokens = torch.arange(total, device=load.device) % 256
    table = torch.arange(1, -(-total // load.block_tokens) + 1, device=load.device)
    cached = load.num_cached_tokens
    first = PromptPart(tokens[:cached], 0, 1, table) if cached else None
    return first, PromptPart(tokens[cached:], cached, 1, table)


def model_for(load: PrefillLoad) -> HybridModel:
    total = load.num_cached_tokens + load.num_new_tokens
    cache = CacheShape(-(-total // load.block_tokens) + 1, load.block_tokens, 2)
    shared = devices.allocate(load.shape, cache, dtype=load.dtype, device=load.device, seed=1)
    return devices.model_on(load.shape, cache, (shared[0].tensor, shared[1].tensor, shared[2].tensor), max_tokens=total)


def run_once(model: HybridModel, part: PromptPart, stream: torch.cuda.Stream | None) -> float:
    """Return seconds of one prompt, from its launch to its token on the host."""
    started = time.perf_counter()
    if stream is None:
        model.next_tokens(None, part).tolist()
    else:
        with torch.cuda.stream(stream):
            model.next_tokens(None, part).tolist()
    return time.perf_counter() - started


def main() -> int:
    load = PrefillLoad(**json.loads(sys.argv[1]))
    model = model_for(load)
    stream = None
    if load.device == "cpu":
        torch.set_num_threads(load.num_threads or torch.get_num_threads())
        if load.partition == "affinity":
            CpuSets("prefill", load.num_threads).take(load.share)
    else:
        stream = streams_of(load.partition, "prefill").of(load.share)
    first, part = prompt_parts(load)
    if first is not None:
        run_once(model, first, stream)
    run_once(model, part, stream)  # warm
    while not select.select([sys.stdin], [], [], 0)[0]:
        sys.stdout.write(f"{run_once(model, part, stream):.6f}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
