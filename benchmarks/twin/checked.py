"""The twin beside queueing theory, the solver, the paper's Table 6 and the measurements of PPD's authors."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.solver.paper import TABLE_6
from benchmarks.studies.studies import Table
from benchmarks.studies.theory import relative_wait
from benchmarks.twin import measured_ppd
from benchmarks.twin.figure import Figure
from prfaas.sim.run import SimulationRun, prepare, simulate, traffic
from prfaas.sim.scenario import VARIANTS, Scenario
from prfaas.sim.stations import StationTwin

THEORY = {
    "M/M/1 at 0.7": (1, 1.0, 0.7),
    "M/D/1 at 0.7": (1, 0.0, 0.7),
    "M/G/1 at 0.7": (1, 0.64, 0.7),
    "M/G/1 of high variance at 0.5": (1, 2.0, 0.5),
    "M/M/4 at 0.7": (4, 1.0, 0.7),
    "M/G/3 at 0.7": (3, 0.64, 0.7),
    "M/G/9 at 0.8": (9, 0.64, 0.8),
}


def theory() -> Iterator[Figure]:
    """Waits of one station, and what is conserved in a whole run."""
    for name, (servers, squared_cv, load) in THEORY.items():
        ratio = relative_wait(servers, squared_cv, load, count=1_000_000)
        yield Figure(f"{name}: mean wait over theory's", round(ratio, 4), "within 3 %", abs(ratio - 1) <= 0.03)
    scenario = Scenario(load="90%", requests=20_000)
    setup = prepare(scenario)
    requests = traffic(scenario, setup, 2.8)
    twin = StationTwin(setup.deployment, setup.workload, setup.plan, scenario)
    twin.run(requests)
    kv_bytes = setup.deployment.model.kv_bytes
    offloaded = sum(kv_bytes(request.num_uncached_tokens) for request in requests if request.reason == "long")
    error = abs(twin.egress.sent.total / offloaded - 1)
    yield Figure(
        "bytes that left the link against those offloaded, relative error", error, "at most 1e-9", error <= 1e-9
    )


def case_study() -> Iterator[Figure]:
    """Capacity when saturated, Table 6 without queues."""
    for fidelity in ("stations", "instances"):
        for variant in VARIANTS:
            run = simulate(Scenario(fidelity=fidelity, variant=variant, load="1.2", requests=60_000))
            error = run.summary.throughput / run.setup.capacity - 1
            name = f"{variant}, {fidelity}: saturated throughput against the exact capacity"
            yield Figure(name, round(error, 4), "within 1.5 %", abs(error) <= 0.015)
    idle = {variant: _idle(variant).summary.ttft for variant in VARIANTS}
    errors = [found.mean / TABLE_6[name]["ttft_mean_seconds"] - 1 for name, found in idle.items()]
    errors += [found.quantile(0.9) / TABLE_6[name]["ttft_p90_seconds"] - 1 for name, found in idle.items()]
    worst = max(errors, key=abs)
    yield Figure(
        "Table 6 without queues, worst of mean and P90 TTFT", round(worst, 4), "within 3 %", abs(worst) <= 0.03
    )
    gain = idle["prfaas-pd"].quantile(0.9) / idle["homogeneous-pd"].quantile(0.9) - 1
    name = "P90 TTFT of PrfaaS-PD against homogeneous, without queues"
    yield Figure(name, round(gain, 3), "-0.64 ± 0.03", abs(gain + 0.64) <= 0.03)


def _idle(variant: str) -> SimulationRun:
    """Table 6's own account: one request after the other, prefill makes the first token."""
    return simulate(Scenario(variant=variant, load="0.05req/s", requests=60_000, first_token_steps=0, warmup=0.0))


def ppd() -> Iterator[Figure | Table]:
    """Yield the half of PPD's measured workloads that nothing was fitted to, its many turns, its interference."""
    known = measured_ppd.held_out()
    found = measured_ppd.simulated(list(known))
    errors = measured_ppd.errors(known, found)
    rows = tuple((name, *values) for name, values in errors.items())
    yield Table("PPD held out", ("configuration", "runs", "TTFT, median error", "TPOT, median error"), rows)
    for name, (runs, ttft, tpot) in errors.items():
        run = f"PPD held out, {name}, {runs} runs"
        yield Figure(f"{run}: TTFT, median error", round(ttft, 3), "at most 25 %", ttft <= 0.25)
        yield Figure(f"{run}: TPOT, median error", round(tpot, 3), "at most 15 %", tpot <= 0.15)
    right, cells = measured_ppd.right_signs(known, found)
    yield Figure(
        "PPD held out: cells with the right sign", f"{right} of {cells}", "at least 95 %", right >= 0.95 * cells
    )
    turns = statistics.median(abs(error) for error in measured_ppd.turn_errors())
    yield Figure(
        "PPD, up to 16 turns: TTFT of later turns, median error", round(turns, 3), "within 15 %", turns <= 0.15
    )
    yield from _interference()


def _interference() -> Iterator[Figure]:
    """Yield the law against the slowdown as printed, and against the step time that the calibrated half gives."""
    for kind in measured_ppd.KINDS:
        cells = measured_ppd.slowdowns(kind)
        raw = _within(
            f"{kind}, as measured", [cell.law - cell.measured for cell in cells], [cell.error for cell in cells]
        )
        distances = [cell.law - cell.against_profile for cell in cells]
        yield raw
        yield _within(f"{kind}, against the fitted step", distances, [cell.error_against_profile for cell in cells])


def _within(name: str, distances: list[float], errors: list[float]) -> Figure:
    within, middle = sum(abs(distance) <= 0.15 for distance in distances), statistics.median(map(abs, distances))
    found = [round(middle, 3), f"{within} of {len(distances)}"]
    reachable = measured_ppd.expected_within(errors, 0.15)
    peer = f"a law that knew every true slowdown: {reachable:.1f} expected, by the five repeats' own standard errors"
    name = f"PPD interference, {name}: median distance; held-out cells within 15 points"
    return Figure(name, found, "all within 15 points", within == len(distances), peer)
