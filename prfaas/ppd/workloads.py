"""Two-turn conversations with which PPD's table is measured, as in the grid of its authors."""

from __future__ import annotations

from prfaas.scheduler.ppd import ContextClass, WorkloadType

NUM_TURNS = 2  # Requests of one conversation.
# The authors' grid, in conversations that begin per second.
QPS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)
REQUEST_RATES = tuple(NUM_TURNS * rate for rate in QPS)  # The same loads in requests per second.
# Prompt and answer of the first turn, in tokens.
FIRST_TURNS: dict[ContextClass, tuple[int, int]] = {"small": (128, 128), "large": (1024, 1024)}
# New tokens and answer of the second turn.
SECOND_TURNS: dict[WorkloadType, tuple[int, int]] = {
    "tiny": (16, 32),
    "short_gen": (32, 256),
    "long_gen": (32, 512),
    "very_long_gen": (64, 1024),
    "small_bal": (64, 64),
    "mid_bal": (128, 128),
    "mid_paste": (256, 64),
    "big_paste": (512, 64),
    "huge_paste": (1024, 32),
}
