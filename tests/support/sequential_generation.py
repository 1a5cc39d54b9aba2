"""The reference: one request after the other, one process, one step at a time. What every executor must repeat."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prfaas.colocate.model.model import DecodeRows, HybridModel, PromptPart


def generate(model: HybridModel, prompt: Sequence[int], max_tokens: int, *, stop_token: int | None = None) -> list[int]:
    """Return the greedy continuation, its stop token included; uses blocks from 1 on and state slot 1 of the model's cache."""
    num_blocks = -(-(len(prompt) + max_tokens) // model.cache.block_tokens)
    table = torch.arange(1, num_blocks + 1)
    token = model.next_tokens(None, PromptPart(torch.tensor(prompt), 0, 1, table))
    tokens = [int(token)]
    while len(tokens) < max_tokens and tokens[-1] != stop_token:
        position = torch.tensor([len(prompt) + len(tokens) - 1])
        token = model.next_tokens(DecodeRows(token, position, torch.tensor([1]), table[None]), None)
        tokens.append(int(token))
    return tokens
