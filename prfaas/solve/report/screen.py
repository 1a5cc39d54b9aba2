"""Report of the planner as text."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prfaas.model.cost.egress_price import DAY_HOURS
from prfaas.model.cost.lengths import mean_tokens
from prfaas.model.deployment import Deployment
from prfaas.model.planning.fleet import Day
from prfaas.model.planning.plan import Plan
from prfaas.solve.files.quantities import show_gbps, show_seconds, show_tokens
from prfaas.solve.report.export import figures
from prfaas.solve.study import FleetAnswer, Study, gain

_NONE = "-"
# Label and format of a deployment's figures, by their JSON name.
_FIGURES = {
    "threshold_tokens": ("threshold t, tokens", "{:.0f}"),
    "num_prfaas": ("N_prfaas", "{:.0f}"),
    "num_prefill": ("N_p", "{:.5g}"),
    "num_decode": ("N_d", "{:.5g}"),
    "offload_ratio": ("offloaded p", "{:.1%}"),
    "mean_offloaded_tokens": ("mean offloaded length, tokens", "{:.0f}"),
    "prfaas_throughput": ("Θ_prfaas, req/s", "{:.2f}"),
    "pd_prefill_throughput": ("Θ_pd-p, req/s", "{:.2f}"),
    "pd_decode_throughput": ("Θ_pd-d, req/s", "{:.2f}"),
    "system_throughput": ("Λ_max, req/s", "{:.2f}"),
    "egress_gbps": ("egress, Gbps", "{:.1f}"),
    "ttft_mean_seconds": ("TTFT mean, s (no queue)", "{:.2f}"),
    "ttft_p90_seconds": ("TTFT P90, s (no queue)", "{:.2f}"),
}


@dataclass(frozen=True)
class Section:
    """Part of the report: lines, a table whose first row has the titles, and lines below it."""

    title: str
    lines: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    below: Sequence[str] = ()

    def to_text(self) -> str:
        return "\n".join([*self.lines, *([_table(self.rows)] if self.rows else []), *self.below])


def to_text(rows: Iterable[tuple[str, str]]) -> str:
    """Return labelled lines."""
    return "\n".join(f"{label:<9} {text}".rstrip() for label, text in rows) + "\n"


def sections(study: Study) -> list[Section]:
    """Return all that is behind a plan."""
    found = [_inputs(study), _options(study), _cost(study), _bound(study), _queueing(study), _notes(study)]
    return [section for section in found if section.lines or section.rows]


def answer(study: Study) -> list[tuple[str, str]]:
    """Return the fleet asked for, or the plan itself: the threshold, the roles, what it sustains, costs, and is limited by."""
    if study.fleet:
        return _fleet_answer(study, study.fleet)
    rows = [
        ("plan", _routing(study.main.deployment, study.main.plan)),
        ("roles", _roles(study)),
        ("sustains", _sustained(study)),
        ("costs", _price(study)),
        ("limit", _purchase(study)),
        ("inferred", "; ".join(study.inferred)),
    ]
    return [(label, text) for label, text in rows if text]


def _fleet_answer(study: Study, fleet: FleetAnswer) -> list[tuple[str, str]]:
    """Return the fleet for a demand or a budget, and how it compares with PD instances alone."""
    day, deployment = fleet.day, fleet.day.parts[0].deployment
    counts = [f"{cluster.name}: {cluster.num_instances}" for cluster in deployment.clusters]
    requests = sum(demand.requests_per_second * demand.hours for demand in day.demands) * 3600
    per_thousand = day.per_hour * DAY_HOURS / requests * 1000
    costs = f"{day.per_hour:,.2f} an hour, {per_thousand:,.2f} per thousand requests: instances"
    costs += f" {day.instances_per_hour:,.2f}, egress {day.egress_per_hour:,.2f}{_energy(deployment)}"
    rows = [("fleet", ", ".join(counts) + " (instances)")]
    for demand, part in sorted(zip(day.demands, day.parts, strict=True), key=lambda pair: pair[0].hour or 0.0):
        (split,) = part.plan.splits
        label = "plan" if demand.hours == DAY_HOURS else f"from {demand.hour:g} h"
        roles = f"{split.num_prefill:.0f} prefill, {split.num_decode:.0f} decode"
        rows.append((label, f"{roles}; {_routing(deployment, part.plan)}"))
        serves = f"{demand.requests_per_second:.3g} req/s, {demand.utilisation:.0%} of what it sustains"
        rows.append(("", f"serves {serves}; sends {show_gbps(part.egress_bytes_per_second)}"))
    rows += [("costs", costs), ("instead", _instead(day, fleet.local))]
    if fleet.resized:
        price = fleet.resized.resized_per_hour
        share = price / day.per_hour - 1
        rows.append(("resized", f"a fleet that follows the demand costs {price:,.2f} an hour ({share:+.1%})"))
    rows.append(("inferred", "; ".join(study.inferred)))
    return [(label, text) for label, text in rows if text]


def _instead(day: Day, local: Day | None) -> str:
    if not day.parts[0].deployment.prfaas:
        return "nothing is cheaper: prefill elsewhere does not pay at these prices"
    if local is None:
        return "PD instances alone, up to three times as many, do not serve this"
    count = local.parts[0].deployment.pd[0].num_instances
    if local.demands != day.demands:
        return f"{count} PD instances alone serve {local.demands[0].requests_per_second:.3g} req/s for the money"
    return f"{count} PD instances alone cost {local.per_hour:,.2f} an hour ({local.per_hour / day.per_hour - 1:+.1%})"


def _routing(deployment: Deployment, plan: Plan) -> str:
    remote = " and ".join(cluster.name for cluster in deployment.prfaas)
    if not remote or not plan.offload_ratio:
        return "every prompt is prefilled in the PD clusters"
    if plan.threshold_tokens is None:
        return f"every prompt is prefilled by {remote}"
    go = "go, by length and tenant," if plan.routes else "go"
    return (
        f"prompts of more than {plan.threshold_tokens:,} uncached tokens {go} to {remote}"
        f" ({plan.offload_ratio:.1%} of the requests, {show_gbps(plan.egress_bytes_per_second or 0.0)} when busy)"
    )


def _roles(study: Study) -> str:
    splits = [
        f"{split.cluster}: {_count(split.num_prefill)} prefill, {_count(split.num_decode)} decode"
        for split in study.main.plan.splits
    ]
    remote = [f"{cluster.name}: {cluster.num_instances} prefill" for cluster in study.main.deployment.prfaas]
    return "; ".join([*splits, *remote]) + " (instances)"


def _sustained(study: Study) -> str:
    rate, alone, ttft = study.main.plan.system_throughput, study.alone.system_throughput, study.main.queued
    text = f"{rate:.2f} req/s within the objectives; TTFT at {study.arrivals_per_second:.2f} req/s: mean"
    text += f" {show_seconds(ttft.mean_seconds)}, P90 {show_seconds(ttft.quantile_seconds)}"
    if not study.main.deployment.prfaas:
        return text
    if rate < alone * (1 + 1e-3):
        return f"{text}; the PD clusters alone sustain as much"
    return f"{text}; the PD clusters alone sustain {alone:.2f} req/s"


def _price(study: Study) -> str:
    hour, million = study.main.price_per_hour, study.main.price_per_million
    if hour is None or million is None:
        return ""
    text = f"{hour:,.2f} an hour, {million / 1000:,.2f} per thousand requests"
    if study.main.egress_per_hour:
        text += f" ({study.main.egress_per_hour:,.2f} an hour for egress)"
    text += _energy(study.main.deployment)
    same = study.at_equal_cost
    if same is None or not study.main.deployment.prfaas:
        return text
    rate = same.plan.system_throughput
    return f"{text}; the same money in instances of {same.deployment.pd[0].name} sustains {rate:.2f} req/s"


def _energy(deployment: Deployment) -> str:
    if not deployment.kilowatts:
        return ""
    return f"; draws {deployment.kilowatts:,.0f} kW, {deployment.carbon_per_hour:,.0f} kg of CO2 an hour"


# Requests per second that a purchase must add to be named.
_LEAST_GAIN = 5e-3
_LIMITS = {"prfaas": "remote prefill", "link": "the links", "pd-prefill": "local prefill", "pd-decode": "decode"}


def _purchase(study: Study) -> str:
    """Return what limits the plan, and the resource that adds most: per price of an instance if all prices are known."""
    limit = f"{_LIMITS[study.main.plan.limit]}"
    gains = {
        name: gain(study, name)
        for name, value in study.duals.items()
        if name.startswith("instance:") or value > _LEAST_GAIN
    }
    gains = {name: added for name, added in gains.items() if added > _LEAST_GAIN}
    prices = {f"instance:{cluster.name}": cluster.price_per_hour for cluster in study.main.deployment.clusters}
    instances = [name for name in gains if name in prices]
    if not instances:
        return limit
    best = max(instances, key=lambda name: gains[name] / (prices[name] or 1.0))
    text = f"{limit}; one more instance of {best.partition(':')[2]} adds {gains[best]:.2f} req/s"
    links = gains.keys() - prices.keys()
    if links:
        link = max(links, key=lambda name: gains[name])
        text += f", one more Gbit/s of {link.partition(':')[2]} {gains[link]:.2f}"
    return text


def _table(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Return aligned columns: the first to the left, the rest to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _inputs(study: Study) -> Section:
    deployment, workload = study.main.deployment, study.workload
    rows = [["cluster", "instances", "profile", "", "egress"]]
    for cluster in deployment.prfaas:
        marks = _mark(cluster.profile.inferred)
        egress = deployment.egress(cluster)
        shown = "no limit" if math.isinf(egress) else show_gbps(egress)
        rows.append([f"{cluster.name} (PrfaaS)", str(cluster.num_instances), cluster.profile.name, marks, shown])
    rows += [
        [f"{pd.name} (PD)", str(pd.num_instances), pd.profile.name, _mark(pd.profile.inferred), _NONE]
        for pd in deployment.pd
    ]
    low, high = workload.lengths.support
    batch = ", ".join(
        f"{pd.name}: {capacity.max_batch} requests in {capacity.step_seconds * 1e3:.1f} ms"
        for pd, capacity in zip(deployment.pd, study.decode, strict=True)
    )
    lines = [
        f"model     {deployment.model.name} {_mark(deployment.model.inferred)}".rstrip(),
        f"traffic   {workload.name}: {show_tokens(mean_tokens(workload.lengths))} uncached tokens on average"
        f" ({low:.0f} to {high:.0f}), {workload.output.mean:.0f} out",
        f"decode    {deployment.objectives.decode_tokens_per_second:g} tok/s asked for; largest batch {batch}",
    ]
    return Section("Inputs", lines, rows)


def _mark(inferred: Sequence[str]) -> str:
    return "inferred" if inferred else ""


def _count(number: float) -> str:
    """Show a number of instances, whole numbers without decimals."""
    return f"{number:.0f}" if abs(number - round(number)) < 1e-6 else f"{number:.2f}"


def _cell(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)


def _options(study: Study) -> Section:
    columns = [figures(option) for option in study.options]
    rows = [["", *(option.deployment.name for option in study.options)]]
    rows += [[label, *(_cell(column[name], form) for column in columns)] for name, (label, form) in _FIGURES.items()]
    return Section("Options", rows=rows)


def _cost(study: Study) -> Section:
    if study.main.price_per_hour is None:
        return Section("Cost")
    title = "cost, inferred prices" if "prices" in study.inferred else "cost"
    rows = [[title, "an hour", "a million requests", "Λ_max of PrfaaS-PD over it"]]
    options = [(option.deployment.name, option) for option in study.options]
    if study.at_equal_cost is not None:
        count = sum(pd.num_instances for pd in study.at_equal_cost.deployment.pd)
        options.append((f"homogeneous at equal cost ({count} instances)", study.at_equal_cost))
    for name, option in options:
        throughput = option.plan.system_throughput
        ratio = study.main.plan.system_throughput / throughput if throughput else math.inf
        prices = [_cell(option.price_per_hour, "{:.2f}"), _cell(option.price_per_million, "{:.0f}")]
        rows.append([name, *prices, f"{ratio - 1:+.1%}"])
    return Section("Cost", rows=rows)


def _bound(study: Study) -> Section:
    lines = [
        "bound over every routing policy (linear program over lengths and stations)",
        f"  whole instances  {study.integer.system_throughput:.4f} req/s; the plan is {max(study.gap, 0):.4%} below it",
        f"  roles free       {study.fractional.system_throughput:.4f} req/s, with N_p ="
        f" {', '.join(f'{n:.2f}' for n in study.fractional.solution.num_prefill)}",
    ]
    rows = [["one more", "is worth with roles free", "1 % slower or fewer costs"]]
    units = _units(study.main.deployment)
    for name, value in study.duals.items():
        kind, _, where = name.partition(":")
        label = f"instance of {where}" if kind == "instance" else f"Gbps of {where}"
        share = value * units[name] / study.fractional.system_throughput if value else 0.0
        rows.append([label, f"{value:+.4f} req/s", f"{share:.2f} %"])
    return Section("Bound", lines, rows)


def _units(deployment: Deployment) -> dict[str, float]:
    """Return the number of each resource that has a price in the bound."""
    units = {f"instance:{cluster.name}": float(cluster.num_instances) for cluster in deployment.clusters}
    units |= {f"gbps:{cluster.name}": cluster.egress_bytes_per_second * 8e-9 for cluster in deployment.prfaas}
    return units | {f"gbps:{path.name}": path.bytes_per_second * 8e-9 for path in deployment.paths}


def _queueing(study: Study) -> Section:
    rate, plan = study.arrivals_per_second, study.main.plan
    rows = [["TTFT", "no queue, mean", "P90", "with queues, mean", "P90"]]
    for option in study.options:
        free, queued = option.queue_free, option.queued
        times = (free.mean_seconds, free.quantile_seconds, queued.mean_seconds, queued.quantile_seconds)
        rows.append([option.deployment.name, *(show_seconds(time) for time in times)])
    title = f"at {rate:.2f} req/s ({rate / plan.system_throughput:.0%} of PrfaaS-PD's Λ_max), Poisson arrivals, M/G/k"
    below = []
    if study.slo_rate is not None:
        below.append(
            f"  the TTFT objective holds up to {study.slo_rate:.2f} req/s ({study.slo_rate / plan.system_throughput:.0%})"
        )
    return Section("Time to first token", [title], rows, below)


def _notes(study: Study) -> Section:
    lines = [f"inferred: {name}" for name in study.inferred] + [f"note: {note}" for note in study.notes]
    return Section("Notes", lines)
