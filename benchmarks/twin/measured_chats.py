"""PPD's runs of ShareGPT's and WildChat's conversations, where somebody has put their measurements, beside the twin's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.twin.measured_ppd import measured_rows

DATA_SETS = {"sharegpt": "ShareGPT-like", "wildchat": "WildChat-like"}
_MODES = {"": "x = 0", "w1.0_1.0": "by the table"}
# Data set, configuration, conversations per second, prefill of later turns.
Key = tuple[str, str, float, str]


def latencies() -> dict[Key, tuple[float, float]]:
    """Mean and P90 of a turn's seconds from its arrival to its end; failed runs are left out."""
    found = {}
    for row in measured_rows("conversations.csv"):
        if row["weights"] in _MODES and float(row["success_rate_turns"] or 0) >= 95:
            key = DATA_SETS[row["dataset"]], row["config"], float(row["qps"]), _MODES[row["weights"]]
            found[key] = float(row["all_turns_avg_e2e_ms"]) / 1000, float(row["all_turns_p90_e2e_ms"]) / 1000
    return found


def beside(rows: Sequence[Sequence[str | float]]) -> Iterator[tuple[Key, tuple[float, float], tuple[float, float]]]:
    """Return measured and simulated mean and P90 for the rows of Figure 4 that were measured without failures."""
    known = latencies()
    for name, configuration, qps, mode, mean, _, p90, *_ in rows:
        key = str(name), str(configuration), float(qps), str(mode)
        if key in known:
            yield key, known[key], (float(mean), float(p90))
