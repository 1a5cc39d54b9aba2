"""Process that prefills without pause, so that decode steps can be measured beside it.

    python -m prfaas.colocate.profile.prefill_load SETTINGS_JSON

Prints the seconds of each prompt. Ends when the input closes.
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
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.model.model import HybridModel, PromptPart


@dataclass(frozen=True)
class PrefillLoad:
    """Load of one prefill process. With `num_cached_tokens`, each prompt extends that many cached tokens."""

    shape: str
    dtype: str
    partition: str
    share: float
    num_new_tokens: int
    num_cached_tokens: int = 0
    block_tokens: int = 16
    num_threads: int = 0


def prompt_parts(load: PrefillLoad) -> tuple[PromptPart | None, PromptPart]:
    """Return the part to compute once and the part to compute repeatedly."""
    total = load.num_cached_tokens + load.num_new_tokens
    tokens = torch.arange(total) % 256
    table = torch.arange(1, -(-total // load.block_tokens) + 1)
    cached = load.num_cached_tokens
    first = PromptPart(tokens[:cached], 0, 1, table) if cached else None
    return first, PromptPart(tokens[cached:], cached, 1, table)


def model_for(load: PrefillLoad) -> HybridModel:
    total = load.num_cached_tokens + load.num_new_tokens
    cache = CacheShape(-(-total // load.block_tokens) + 1, load.block_tokens, 2)
    shared = devices.allocate(load.shape, cache, dtype=load.dtype, seed=1)
    return devices.model_on(load.shape, cache, (shared[0].tensor, shared[1].tensor, shared[2].tensor), max_tokens=total)


def run_once(model: HybridModel, part: PromptPart) -> float:
    """Return the seconds of one prompt, from the start to the token."""
    started = time.perf_counter()
    model.next_tokens(None, part).tolist()
    return time.perf_counter() - started


def main() -> int:
    load = PrefillLoad(**json.loads(sys.argv[1]))
    model = model_for(load)
    torch.set_num_threads(load.num_threads or torch.get_num_threads())
    if load.partition == "affinity":
        CpuSets("prefill", load.num_threads).take(load.share)
    first, part = prompt_parts(load)
    if first is not None:
        run_once(model, first)
    run_once(model, part)  # Warm up.
    while not select.select([sys.stdin], [], [], 0)[0]:
        sys.stdout.write(f"{run_once(model, part):.6f}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
