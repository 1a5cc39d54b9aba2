"""PPD's table as text: for each context and workload, at each rate, the instance that prefills and its score."""

from __future__ import annotations

from collections.abc import Iterator

from prfaas.ppd.workloads import SECOND_TURNS
from prfaas.scheduler.ppd import ContextClass, PpdEntry, PpdTable

CONTEXTS: tuple[ContextClass, ...] = ("small", "large")
LEGEND = "D: the decode node prefills the later turn, P: a prefill instance does; score = w_ttft · gain − w_tpot · loss"


def draw(table: PpdTable) -> str:
    """Return the whole table with its legend."""
    rates = sorted({entry.qps for entry in table.entries})
    lines = [f"w_ttft {table.ttft_weight:g}, w_tpot {table.tpot_weight:g}. {LEGEND}."]
    for context in CONTEXTS:
        lines += _context(table, context, rates)
    return "\n".join(lines)


def _context(table: PpdTable, context: ContextClass, rates: list[float]) -> Iterator[str]:
    cells = {(entry.workload_type, entry.qps): entry for entry in table.entries if entry.context_class == context}
    if not cells:
        return
    yield ""
    yield f"{context + ' context':16}" + "".join(f"{f'{rate:g} QPS':>9}" for rate in rates)
    for workload in SECOND_TURNS:
        found = [cells.get((workload, rate)) for rate in rates]
        if any(found):
            yield f"{workload:16}" + "".join(f"{_cell(table, entry):>9}" for entry in found)


def _cell(table: PpdTable, entry: PpdEntry | None) -> str:
    if entry is None:
        return "·"
    if entry.pd_failed:
        return "D failed"
    score = table.score(entry)
    return f"{'D' if score > 0 else 'P'} {score:+.2f}"
