"""Measure the transport over emulated links, beside iperf3 in the same run, and compare it with its bars.

`make bench AREA=transport PROFILES="regional metro" PARTS="bulk packing"` measures a part and keeps the other figures. The
last lines name each recorded row that misses its bar, and the exit status is then 1. Needs root and iperf3.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.transport import iperf, kv_engine, plot
from benchmarks.transport.hybrid_schedule import schedule
from benchmarks.transport.link_ends import Ends, Figures
from benchmarks.transport.near_end import Content
from prfaas.solve.files.catalog import find_model
from tools.missed_bars import figure_of, missed
from tools.wan import PAYLOAD_RATIO, PROFILES, Wan, WanShape, choose, obstacle

GIB, MIB = 1 << 30, 1 << 20
COLD_IPERF = "iperf3 -n 64M -P 16 bbr, cold, of the link"
HYBRIDS = ("Kimi-Linear-48B-A3B", "Qwen3.5-397B-A17B", "Ring-2.5-1T")
HYBRID_REPEATS = 5
REPEATS, COLD_REPEATS, LAYERWISE_REPEATS, TENANT_REPEATS = 5, 7, 20, 5


@dataclass(frozen=True)
class Bars:
    """Requirements on a link: shares of its rate, and seconds beyond half a round trip and a layer's wire time."""

    bulk: float
    small: float | None
    exposed_beyond_seconds: float | None


def bars_of(name: str) -> Bars:
    shape = PROFILES[name]
    return {
        "metro": Bars(0.97, 0.92, 0.005),
        "regional": Bars(0.95, 0.75, 0.020),
        "continental": Bars(0.95, 0.62, shape.rtt_seconds),
        "bursty": Bars(0.88, None, None),
    }[name]


def main() -> int:
    profiles, parts = asked_for("PROFILES", PROFILES), asked_for("PARTS", PARTS)
    if reason := obstacle():
        print(f"skipped: an emulated link {reason}")
        return 0
    print("the link is carried by {} ({})".format(*choose()))
    for name in profiles:
        for part in parts:
            rows = PARTS[part](name)
            if not rows:
                print(f"{part}: nothing to measure on {name}")
            where = {"link": "alternating" if part == "health" else name, "part": part, "measured_on": _today()}
            _keep([{**where, **row} for row in rows])
    return _print_misses(json.loads(plot.RESULT.read_text()))


def asked_for(variable: str, known: Collection[str]) -> list[str]:
    """Return the words of an environment variable, by default all known ones. Exits if a word is unknown."""
    words = os.environ.get(variable, " ".join(known)).split()
    for word in words:
        if word not in known:
            sys.exit(f"{variable}: {word!r} is none of {', '.join(known)}")
    return words


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def _print_misses(rows: Sequence[dict[str, Any]]) -> int:
    """Print every recorded row that misses its bar. Returns the exit status."""
    misses = missed(rows)
    for row in misses:
        print(f"MISSES {row['link']}: {row['name']}: {figure_of(row):g}, bar {row['bar']}")
    return 1 if misses else 0


def _keep(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows, and store them in place of earlier rows of the same link and part."""
    for row in rows:
        print(f"{row['link']:12} {row['name']:44} {row['figure']!s:60} {row['bar']}", flush=True)
    known = json.loads(plot.RESULT.read_text()) if plot.RESULT.exists() else []
    measured = {(row["link"], row["part"]) for row in rows}
    kept = [*(row for row in known if (row["link"], row["part"]) not in measured), *rows]
    plot.RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    plot.draw(kept, plot.PLOT)


def _bulk(name: str) -> list[dict[str, Any]]:
    """Measure bulk transfers of prfaas and of other engines."""
    bars = bars_of(name)
    with Wan(PROFILES[name]) as wan:
        bulk = _bulk_runs(wan)
        peers, engines = _iperf_rows(wan, num_connections=bulk[-1].num_connections), _engine_rows(wan)
        own = [*_bulk_rows(wan, bars, bulk, peers), *_small_rows(wan, bars, [*peers, *engines])]
    return [*peers, *engines, *own, *_ahead_rows(name, engines, own)]


def _layers(name: str) -> list[dict[str, Any]]:
    """Measure transfers behind a prefill, and an urgent transfer beside others."""
    beyond_seconds = bars_of(name).exposed_beyond_seconds
    if beyond_seconds is None:
        return []
    with Wan(PROFILES[name]) as wan:
        return [_layerwise_row(wan, beyond_seconds), *_hybrid_rows(wan), _urgent_row(wan)]


def _variants(name: str) -> list[dict[str, Any]]:
    return [_cubic_row(), _tls_row()] if name == "regional" else []


def _health(name: str) -> list[dict[str, Any]]:
    return _health_rows() if name == "bursty" else []


def _iperf_rows(wan: Wan, *, num_connections: int) -> list[dict[str, Any]]:
    """Measure iperf3, first with as many connections as prfaas uses."""
    if not iperf.is_installed():
        return [_row("iperf3", "skipped: not installed", "-")]
    rows = []
    bbr_runs = [(count, "bbr") for count in dict.fromkeys((num_connections, 16))]
    for num_streams, congestion_control in (*bbr_runs, (16, "cubic")):
        runs = [
            iperf.run(wan, GIB, num_streams=num_streams, congestion_control=congestion_control)
            for _ in range(1 if congestion_control == "cubic" else 3)
        ]
        figure = _spread(_shares(wan.shape, runs))
        figure["cpu_seconds_per_gb"] = round(statistics.median(run.cpu_seconds_per_gb for run in runs), 3)
        rows.append(_row(f"iperf3 -n 1G -P {num_streams} {congestion_control}, of the link", figure, "-"))
    small = [iperf.run(wan, 64 * MIB, num_streams=16, congestion_control="bbr") for _ in range(COLD_REPEATS)]
    rows.append(_row(COLD_IPERF, _spread(_shares(wan.shape, small)), "-"))
    return rows


def _engine_rows(wan: Wan) -> list[dict[str, Any]]:
    """Measure other engines: 1 GiB in one call, and 64 MiB with a call per layer, as layer-wise connectors do."""
    rows = []
    for setting in kv_engine.SETTINGS:
        what = f"{setting.engine}, {setting.name}"
        if not kv_engine.is_installed(setting.engine):
            rows.append(_row(what, "skipped: not installed", "-"))
            continue
        with kv_engine.EngineEnds(wan, setting) as ends:
            bulk = [ends.write(GIB, num_objects=64, is_per_layer=False) for _ in range(3)]
            layers = [ends.write(64 * MIB, num_objects=16, is_per_layer=True) for _ in range(3)]
        cold = [_cold_write(wan, setting) for _ in range(COLD_REPEATS)]
        rows += [
            _engine_row(wan, f"{what}, 1 GiB", bulk),
            _engine_row(wan, f"{what}, 64 MiB by layer", layers),
            _engine_row(wan, f"{what}, 64 MiB, cold", cold),
        ]
    return rows


def _cold_write(wan: Wan, setting: kv_engine.Setting) -> kv_engine.EngineRun:
    with kv_engine.EngineEnds(wan, setting) as ends:
        return ends.write(64 * MIB, num_objects=16, is_per_layer=False)


def _engine_row(wan: Wan, name: str, runs: Sequence[kv_engine.EngineRun]) -> dict[str, Any]:
    figure = _spread(_shares(wan.shape, runs))
    figure["cpu_seconds_per_gb"] = round(statistics.median(run.cpu_seconds_per_gb for run in runs), 3)
    return _row(f"{name}, of the link", figure, "-")


def _ahead_rows(name: str, engines: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the first of the own rows with the best bulk row of other engines, and with Mooncake's default."""
    bulk = {engine["name"]: engine["figure"]["median"] for engine in engines if "1 GiB" in engine["name"]}
    if not bulk:
        return []
    own_share, is_regional = own[0]["figure"]["median"], name == "regional"
    rows = [
        _row(
            "1 GiB over the best KV engine", round(own_share / max(bulk.values()), 2), f">= {1.2 if is_regional else 1}"
        )
    ]
    default = bulk.get("mooncake, default, 1 GiB, of the link")
    if default:
        rows.append(
            _row("1 GiB over Mooncake's default", round(own_share / default, 2), ">= 1.7" if is_regional else "-")
        )
    return rows


def _bulk_runs(wan: Wan) -> list[Figures]:
    """Measure bulk transfers, the first of them on an unused link."""
    with Ends(wan) as ends:
        return [ends.transfer(GIB, num_layers=64) for _ in range(1 + REPEATS)]


def _bulk_rows(wan: Wan, bars: Bars, runs: Sequence[Figures], peers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    cold, *warm = runs
    shares = _spread(_shares(wan.shape, warm))
    figure = {**shares, "cold": round(_shares(wan.shape, [cold])[0], 3)}
    rows = [_row("1 GiB as 64 layers, warm, of the link", figure, f"median >= {bars.bulk}")]
    measured = [peer["figure"] for peer in peers if "-n 1G" in peer["name"]]
    if measured:
        best = max(measured, key=lambda figure: figure["median"])
        rows.append(_row("the same over the best iperf3", round(shares["median"] / best["median"], 3), ">= 0.96"))
        cpu = statistics.median(run.cpu_seconds_per_gb for run in warm)
        ratio = {"ratio": round(cpu / measured[0]["cpu_seconds_per_gb"], 2), "seconds_per_gb": round(cpu, 3)}
        rows.append(_row("CPU over iperf3 with as many connections, both ends", ratio, "<= 1.6"))
    return rows


def _small_rows(wan: Wan, bars: Bars, peers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    with Ends(wan) as ends:
        ends.transfer(64 * MIB, num_layers=16)
        warm = [ends.transfer(64 * MIB, num_layers=16) for _ in range(REPEATS)]
    cold = []
    for _ in range(COLD_REPEATS):
        with Ends(wan) as ends:
            cold.append(ends.transfer(64 * MIB, num_layers=16))
    bar = f"median >= {bars.small}" if bars.small else "-"
    best_cold = max((peer["figure"]["median"] for peer in peers if "cold" in peer["name"]), default=0)
    return [
        _row("64 MiB as 16 layers, warm, of the link", _spread(_shares(wan.shape, warm)), bar),
        _row("64 MiB as 16 layers, cold, of the link", _spread(_shares(wan.shape, cold)), f">= {best_cold}"),
    ]


def _layerwise_row(wan: Wan, beyond_seconds: float) -> dict[str, Any]:
    limit = wan.shape.payload_bytes_per_second
    layer_bytes = GIB // 64
    with Ends(wan) as ends:
        ends.transfer(GIB, num_layers=64)
        runs = [
            ends.transfer(GIB, num_layers=64, pause_seconds=layer_bytes / (0.9 * limit))
            for _ in range(LAYERWISE_REPEATS)
        ]
    bar = wan.shape.rtt_seconds / 2 + layer_bytes / limit + beyond_seconds
    figure = _spread([run.exposed_seconds * 1e3 for run in runs], digits=1)
    return _row("exposed after the last of 64 layers, ms", figure, f"median <= {bar * 1e3:.1f}")


def _hybrid_rows(wan: Wan) -> list[dict[str, Any]]:
    """Measure hybrid models behind a prefill that takes as long as their bytes: states by layer, or in one burst."""
    rows = []
    with Ends(wan) as ends:
        ends.transfer(GIB, num_layers=64)
        for name in HYBRIDS:
            geometry = find_model(name)
            for states_at_end, how in ((False, "states by layer"), (True, "states in one burst")):
                ready = schedule(
                    geometry, bytes_per_second=wan.shape.payload_bytes_per_second, states_at_end=states_at_end
                )
                exposed = [ends.scheduled(ready).exposed_seconds * 1e3 for _ in range(HYBRID_REPEATS)]
                rows.append(_row(f"{name}, 16K tokens, {how}: exposed ms", _spread(exposed, digits=1), "-"))
    return rows


def _urgent_row(wan: Wan) -> dict[str, Any]:
    with Ends(wan) as ends:
        ends.transfer(GIB, num_layers=64)
        pairs = [ends.urgent(8 * MIB, bulk_bytes=GIB, after_seconds=0.3) for _ in range(REPEATS)]
    ratios = [beside.seconds / (2 * alone.seconds + wan.shape.rtt_seconds) for alone, beside in pairs]
    return _row("urgent 8 MiB beside 2 GiB, over twice alone + RTT", _spread(ratios, digits=2), "median <= 1")


def _tenants(name: str) -> list[dict[str, Any]]:
    """Measure a tenant's prompt alone, and beside 50 prompts of another tenant."""
    ratios = []
    with Wan(PROFILES[name]) as wan:
        for _ in range(TENANT_REPEATS):
            with Ends(wan, pool_bytes=128 * MIB) as ends:
                found = ends.crowd(50, crowd_bytes=32 * MIB, own_bytes=128 * MIB, after_seconds=2.0)
            ratios.append(found["beside_seconds"] / found["alone_seconds"])
    return [_row("128 MiB beside 50 of another tenant, over alone", _spread(ratios, digits=2), "median <= 2.2")]


def _packing_rows(name: str) -> list[dict[str, Any]]:
    """Measure the same bytes with and without packing, in turn. Noise must not be slower; floats should be faster."""
    rows = []
    contents: tuple[Content, ...] = ("noise", "bf16")
    with Wan(PROFILES[name]) as wan:
        for content in contents:
            with Ends(wan, content=content) as packing, Ends(wan, content=content, packs=False) as plain:
                for ends in (packing, plain):
                    ends.transfer(GIB // 2, num_layers=32)
                pairs = [
                    (packing.transfer(GIB // 2, num_layers=32), plain.transfer(GIB // 2, num_layers=32))
                    for _ in range(REPEATS)
                ]
            figure = _spread([without.seconds / packed.seconds for packed, without in pairs])
            cpu = [statistics.median(ending.cpu_seconds_per_gb for ending in ends) for ends in zip(*pairs, strict=True)]
            figure |= {"cpu_seconds_per_gb": round(cpu[0], 2), "without": round(cpu[1], 2)}
            bar = "median >= 0.97" if content == "noise" else "median >= 1"
            rows.append(_row(f"512 MiB of {content}, packing over not packing", figure, bar))
    return rows


def _cubic_row() -> dict[str, Any]:
    with Wan(PROFILES["regional"]) as wan, Ends(wan, congestion_control="cubic") as ends:
        runs = [ends.transfer(GIB, num_layers=64) for _ in range(REPEATS)]
        return _row("1 GiB without BBR (cubic), of the link", _spread(_shares(wan.shape, runs)), "median >= 0.7")


def _tls_row() -> dict[str, Any]:
    with Wan(PROFILES["regional"]) as wan, Ends(wan, is_encrypted=True) as ends:
        ends.transfer(GIB, num_layers=64)
        runs = [ends.transfer(GIB, num_layers=64) for _ in range(REPEATS)]
    figure = _spread(_shares(wan.shape, runs))
    figure["cpu_seconds_per_gb"] = round(statistics.median(run.cpu_seconds_per_gb for run in runs), 3)
    return _row("1 GiB under TLS 1.3, warm, of the link", figure, "median >= 0.85")


def _health_rows() -> list[dict[str, Any]]:
    """Measure the error of the rate estimate while the rate of the link alternates every ten seconds."""
    shape = WanShape(1e9, 0.040, 0.0, 0.3e9, 10.0)
    with Wan(shape) as wan, Ends(wan) as ends:
        samples = ends.health(seconds=41, idle_seconds=5)
    errors = []
    for at, rate, _ in samples["busy"]:
        into_phase, phase = at % shape.period_seconds, int(at // shape.period_seconds)
        if into_phase >= 1 and at - samples["busy"][0][0] >= 1:
            true = (shape.second_bits_per_second if phase % 2 else shape.bits_per_second) / 8 * PAYLOAD_RATIO
            errors.append(abs(rate / true - 1))
    raised = next((at for at, _, reason in samples["busy"] if reason), float("inf")) - samples["busy"][0][0]
    idle = sum(reason is not None for *_, reason in samples["idle"])
    return [
        _row("achievable rate, error from 1 s after each change", _spread(errors), "max <= 0.2"),
        _row("congested, seconds after the queue builds up", round(raised, 2), "<= 1"),
        _row("congested on an idle link, samples", idle, "0"),
        _row("a warm idle link, of a core", round(samples["idle_cpu_ratio"], 4), "<= 0.005 for sampling"),
    ]


def _shares(shape: WanShape, runs: Sequence[Figures | kv_engine.EngineRun | iperf.IperfRow]) -> list[float]:
    """Return the share of the link's capacity that each run used, considering the phases of an alternating rate."""
    return [run.num_bytes / shape.payload_bytes_between(run.began_ns, run.ended_ns) for run in runs]


def _spread(values: Sequence[float], *, digits: int = 3) -> dict[str, float]:
    named: dict[str, Callable[[Sequence[float]], float]] = {"median": statistics.median, "min": min, "max": max}
    return {name: round(of(values), digits) for name, of in named.items()}


def _row(name: str, figure: object, bar: str) -> dict[str, Any]:
    return {"name": name, "figure": figure, "bar": bar}


PARTS: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "bulk": _bulk,
    "layers": _layers,
    "variants": _variants,
    "health": _health,
    "packing": _packing_rows,
    "tenants": _tenants,
}


if __name__ == "__main__":
    sys.exit(main())
