"""Report of runs as JSON, and the same figures as a table."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from prfaas.sim.run import SimulationRun
from prfaas.sim.summary import QUANTILES, Distribution, Summary

_LATENCIES: Mapping[str, Callable[[Summary], Distribution]] = MappingProxyType({
    "TTFT": lambda summary: summary.ttft,
    "TPOT": lambda summary: summary.tpot,
    "ITL": lambda summary: summary.itl,
    "end to end": lambda summary: summary.end_to_end,
    "prefill wait": lambda summary: summary.prefill_wait,
})  # fmt: skip
# Label and format of the plain figures, by their JSON name.
_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = MappingProxyType({
    "threshold_tokens": ("t (tokens)", "{:.0f}".format),
    "num_prefill": ("N_p", "{:g}".format),
    "num_decode": ("N_d", "{:g}".format),
    "capacity": ("capacity (req/s)", "{:.3f}".format),
    "num_requests": ("requests counted", "{:.0f}".format),
    "arrivals": ("arrivals (req/s)", "{:.3f}".format),
    "throughput": ("throughput (req/s)", "{:.3f}".format),
    "goodput": ("goodput (req/s)", "{:.3f}".format),
    "attainment": ("objectives met", "{:.1%}".format),
    "success_ratio": ("success", "{:.1%}".format),
    "retried_ratio": ("sent again", "{:.1%}".format),
    "cached_ratio": ("prefix found", "{:.1%}".format),
    "preempted_ratio": ("preempted", "{:.1%}".format),
    "price_per_thousand": ("price of 1,000 requests", "{:.3g}".format),
    "egress_bytes_per_second": ("egress (Gbps)", lambda rate: f"{rate * 8e-9:.2f}"),
})  # fmt: skip
# Prefix of the label of each share, by the JSON name of all of them.
_SHARES = MappingProxyType({"utilisation": "busy ", "reasons": "reason "})


def render(runs: Sequence[tuple[str, SimulationRun]]) -> str:
    """Return a table with one row per figure and one column per run."""
    columns = [_column(to_json(name, run)) for name, run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [["", *(name for name, _ in runs)]]
    rows += [[label, *(column.get(label, "-") for column in columns)] for label in labels]
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    lines += [f"{name}: the trace has no more requests" for name, run in runs if _is_short(run)]
    return "\n".join(lines) + "\n"


def _is_short(run: SimulationRun) -> bool:
    scenario = run.scenario
    wanted = scenario.requests - int(scenario.requests * scenario.warmup)
    return scenario.arrivals == "trace" and run.summary.num_requests < wanted


def _column(figures: dict[str, Any]) -> dict[str, str]:
    """Return the cells of one run by label."""
    cells = {label: _cell(figures[name], show) for name, (label, show) in _FIGURES.items()}
    for name in _LATENCIES:
        for figure, seconds in figures[_key(name)].items():
            cells[f"{name} {figure.replace('p', 'P')} (s)"] = _cell(seconds, "{:.4g}".format)
    for name, prefix in _SHARES.items():
        cells |= {f"{prefix}{label}": f"{share:.1%}" for label, share in figures[name].items()}
    return cells


def _cell(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _price_per_thousand(run: SimulationRun) -> float | None:
    """Return the price of 1,000 answered requests; None without prices or without answers."""
    price = run.setup.deployment.price_per_hour
    return None if price is None or not run.summary.throughput else price / 3.6 / run.summary.throughput


def to_json(name: str, run: SimulationRun) -> dict[str, Any]:
    """Return one run as JSON; null where a figure has no meaning."""
    summary, plan = run.summary, run.setup.plan
    others = {
        "threshold_tokens": plan.threshold_tokens,
        "num_prefill": plan.num_prefill,
        "num_decode": plan.num_decode,
        "capacity": run.setup.capacity,
        "price_per_thousand": _price_per_thousand(run),
    }
    return {
        "name": name,
        "seed": run.scenario.seed,
        "rate": run.rate,
        **{key: others[key] if key in others else getattr(summary, key) for key in _FIGURES},
        **{key: dict(getattr(summary, key)) for key in _SHARES},
        **{_key(latency): _figures(of(summary)) for latency, of in _LATENCIES.items()},
    }


def _key(latency: str) -> str:
    return latency.lower().replace(" ", "_")


def _figures(found: Distribution) -> dict[str, float | None]:
    named = {"mean": found.mean, **{f"p{ratio * 100:g}": found.quantile(ratio) for ratio in QUANTILES}}
    return {name: None if math.isnan(value) else value for name, value in named.items()}
