"""Table that the demo prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADINGS = ("request", "route", "reason", "tokens", "prefilled", "wire bytes", "acked early", "TTFT ms", "KV", "answer")


@dataclass(frozen=True)
class Row:
    """Request and its result.

    `num_prefilled_tokens` counts the tokens that engines computed; None if several requests ran at once.
    `early_ratio` is the share of wire bytes that were acknowledged before prefill ended.
    """

    name: str
    route: str
    reason: str
    num_prompt_tokens: int
    num_prefilled_tokens: int | None
    wire_bytes: int
    early_ratio: float | None
    ttft_seconds: float
    ended: str
    tokens_equal: bool
    fault: str | None = None

    def cells(self) -> tuple[str, ...]:
        early = "-" if self.early_ratio is None else f"{self.early_ratio:.0%}"
        return (
            self.name,
            self.route,
            self.reason,
            str(self.num_prompt_tokens),
            "-" if self.num_prefilled_tokens is None else str(self.num_prefilled_tokens),
            f"{self.wire_bytes:,}",
            early,
            f"{self.ttft_seconds * 1e3:.0f}",
            self.ended,
            "equal" if self.tokens_equal else "DIFFERENT",
        )


def render(rows: Sequence[Row]) -> str:
    """Return the rows as an aligned table, followed by one line per fault."""
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    text += [f"wrong: {row.name}: {row.fault}" for row in rows if row.fault]
    return "\n".join(text)
