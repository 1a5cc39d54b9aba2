"""Schedule of a hybrid model's bytes behind a chunked prefill that the link can just follow (pure)."""

from __future__ import annotations

from typing import NamedTuple

from prfaas.model.kv.geometry import Geometry, GroupBytes

PROMPT_TOKENS, CHUNK_TOKENS = 16384, 4096
LINK_SHARE = 0.9  # Share of the link that the prompt's bytes use during its prefill.


class Ready(NamedTuple):
    """Bytes of one layer and one chunk of the prompt, and when they are ready."""

    at_seconds: float
    num_bytes: int


def schedule(geometry: Geometry, *, bytes_per_second: float, states_at_end: bool) -> list[Ready]:
    """Return the schedule in order. States leave when their layer ends in the last chunk, or all with the last layer.

    The prefill takes as long as the link needs for the whole prompt at `LINK_SHARE`. Each layer and each chunk takes an
    equal part of it. The states in the last chunk are more than the link carries meanwhile.
    """
    layers = _layers_in_order(geometry)
    num_chunks = PROMPT_TOKENS // CHUNK_TOKENS
    seconds = geometry.kv_bytes(PROMPT_TOKENS) / (LINK_SHARE * bytes_per_second)
    step = seconds / (num_chunks * len(layers))
    found: list[Ready] = []
    for chunk in range(num_chunks):
        for number, group in enumerate(layers):
            is_last_chunk, at = chunk == num_chunks - 1, step * (chunk * len(layers) + number + 1)
            tokens = round(group.bytes_per_token / group.num_layers * _kept(group, is_last_chunk))
            state = round(group.state_bytes / group.num_layers) if is_last_chunk else 0
            found += [Ready(at, tokens)] if tokens else []
            found += [Ready(seconds if states_at_end else at, state)] if state else []
    return sorted(found, key=lambda item: item.at_seconds)


def _kept(group: GroupBytes, is_last_chunk: bool) -> int:
    """Return the tokens of a chunk that travel. A sliding window travels only with the last chunk."""
    if group.window_tokens is None:
        return CHUNK_TOKENS
    return min(group.window_tokens, PROMPT_TOKENS) if is_last_chunk else 0


def _layers_in_order(geometry: Geometry) -> list[GroupBytes]:
    """Return the group of each layer, with the kinds spread evenly over the depth as in hybrid models."""
    placed = [
        ((number + 0.5) / group.num_layers, order, group)
        for order, group in enumerate(geometry.groups)
        for number in range(group.num_layers)
    ]
    return [group for *_, group in sorted(placed, key=lambda item: item[:2])]
