"""Report of runs as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from prfaas.sim.run import SimulationRun
from prfaas.sim.summary import QUANTILES, Distribution, Summary

_LATENCIES: dict[str, Callable[[Summary], Distribution]] = {
    "TTFT": lambda summary: summary.ttft,
    "TPOT": lambda summary: summary.tpot,
    "ITL": lambda summary: summary.itl,
    "end to end": lambda summary: summary.end_to_end,
    "prefill wait": lambda summary: summary.prefill_wait,
}
_GBIT = 1e9 / 8


def render(runs: Sequence[tuple[str, SimulationRun]]) -> str:
    """Return a table with one row per figure and one column per run."""
    rows = [["", *(name for name, _ in runs)]]
    for label, show in _lines(runs):
        rows.append([label, *(show(run) for _, run in runs)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def _lines(runs: Sequence[tuple[str, SimulationRun]]) -> list[tuple[str, Callable[[SimulationRun], str]]]:
    lines: list[tuple[str, Callable[[SimulationRun], str]]] = [
        ("t (tokens)", _threshold),
        ("N_p / N_d", lambda run: f"{run.setup.plan.num_prefill:g} / {run.setup.plan.num_decode:g}"),
        ("capacity (req/s)", lambda run: f"{run.setup.capacity:.3f}"),
        ("requests counted", _num_counted),
        ("arrivals (req/s)", lambda run: f"{run.summary.arrivals:.3f}"),
        ("throughput (req/s)", lambda run: f"{run.summary.throughput:.3f}"),
        ("goodput (req/s)", lambda run: f"{run.summary.goodput:.3f}"),
        ("objectives met", lambda run: f"{run.summary.attainment:.1%}"),
        ("success", lambda run: f"{run.summary.success_ratio:.1%}"),
        ("sent again", lambda run: f"{run.summary.retried_ratio:.1%}"),
        ("prefix found", lambda run: f"{run.summary.cached_ratio:.1%}"),
        ("less found than known", lambda run: f"{run.summary.stale_ratio:.1%}"),
        ("preempted", lambda run: f"{run.summary.preempted_ratio:.1%}"),
        ("price of 1,000 requests", _price),
        ("egress (Gbps)", lambda run: f"{run.summary.egress_bytes_per_second / _GBIT:.2f}"),
    ]
    for name, of in _LATENCIES.items():
        lines.append((f"{name} mean (s)", lambda run, of=of: _seconds(of(run.summary).mean)))  # type: ignore[misc]
        for ratio in QUANTILES:
            label = f"{name} P{ratio * 100:g} (s)"
            lines.append((label, lambda run, of=of, ratio=ratio: _seconds(of(run.summary).quantile(ratio))))  # type: ignore[misc]
    lines += [(f"busy {name}", _share_of("utilisation", name)) for name in _names(runs, "utilisation")]
    lines += [(name, _share_of("memory", name)) for name in _names(runs, "memory")]
    return lines + [(f"reason {name}", _share_of("reasons", name)) for name in _names(runs, "reasons")]


def _num_counted(run: SimulationRun) -> str:
    """Return the number of counted requests, with a remark if the trace is shorter than requested."""
    scenario, counted = run.scenario, run.summary.num_requests
    is_short = scenario.arrivals == "trace" and counted < scenario.requests - int(scenario.requests * scenario.warmup)
    return f"{counted} (the trace has no more)" if is_short else str(counted)


def _threshold(run: SimulationRun) -> str:
    tokens = run.setup.plan.threshold_tokens
    return "-" if tokens is None else str(tokens)


def price_per_thousand(run: SimulationRun) -> float | None:
    """Return the price of 1,000 answered requests; None without prices or without answers."""
    price = run.setup.deployment.price_per_hour
    return None if price is None or not run.summary.throughput else price / 3.6 / run.summary.throughput


def _price(run: SimulationRun) -> str:
    price = price_per_thousand(run)
    return "-" if price is None else f"{price:.3g}"


def _names(runs: Sequence[tuple[str, SimulationRun]], field: str) -> list[str]:
    return list(dict.fromkeys(name for _, run in runs for name in getattr(run.summary, field)))


def _share_of(field: str, name: str) -> Callable[[SimulationRun], str]:
    def show(run: SimulationRun) -> str:
        shares = getattr(run.summary, field)
        return f"{shares[name]:.1%}" if name in shares else "-"

    return show


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def to_json(name: str, run: SimulationRun) -> dict[str, Any]:
    """Return one run as JSON; null where a figure has no meaning."""
    summary, plan = run.summary, run.setup.plan
    plain = {key: getattr(summary, key) for key in ("num_requests", "arrivals", "throughput", "goodput")}
    return {
        "name": name,
        "seed": run.scenario.seed,
        "threshold_tokens": plan.threshold_tokens,
        "num_prefill": plan.num_prefill,
        "num_decode": plan.num_decode,
        "capacity": run.setup.capacity,
        "rate": run.rate,
        **plain,
        "success_ratio": summary.success_ratio,
        "retried_ratio": summary.retried_ratio,
        "attainment": summary.attainment,
        "cached_ratio": summary.cached_ratio,
        "stale_ratio": summary.stale_ratio,
        "preempted_ratio": summary.preempted_ratio,
        "egress_bytes_per_second": summary.egress_bytes_per_second,
        "price_per_thousand": price_per_thousand(run),
        "utilisation": dict(summary.utilisation),
        "memory": dict(summary.memory),
        "over_time": {name: list(counts) for name, counts in summary.over_time.items()},
        "reasons": dict(summary.reasons),
        **{name.lower().replace(" ", "_"): _figures(of(summary)) for name, of in _LATENCIES.items()},
    }


def _figures(found: Distribution) -> dict[str, float | None]:
    named = {"mean": found.mean, **{f"p{ratio * 100:g}": found.quantile(ratio) for ratio in QUANTILES}}
    return {name: None if math.isnan(value) else value for name, value in named.items()}
