"""Report of the planner as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prfaas.model.cost.lengths import mean_tokens
from prfaas.model.deployment import Deployment
from prfaas.model.planning.fleet import Demand, Fleet
from prfaas.model.planning.plan import Plan
from prfaas.solve.files.quantities import show_gbps, show_seconds, show_tokens
from prfaas.solve.report.export import figures
from prfaas.solve.study import Study

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


def render(study: Study, *, explain: bool) -> str:
    """Return the plan in a few lines; with `explain` all that is behind it."""
    sections = [_answer(study)]
    if explain:
        sections += [
            _inputs(study),
            _options(study),
            _cost(study),
            _bound(study),
            _queueing(study),
            _sensitivity(study),
            _notes(study),
        ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _answer(study: Study) -> str:
    """Return the plan itself: the threshold, the roles, what it sustains, costs, and is limited by."""
    rows = [
        ("plan", _routing(study.main.deployment, study.main.plan)),
        ("roles", _roles(study)),
        ("sustains", _sustained(study)),
        ("costs", _price(study)),
        ("limit", _purchase(study)),
    ]
    if study.inferred:
        rows.append(("inferred", "; ".join(study.inferred)))
    return "\n".join(f"{label:<9} {text}" for label, text in rows if text)


def render_fleet(study: Study, demand: Demand, fleet: Fleet, local: Fleet | None) -> str:
    """Return the cheapest fleet for a demand, and how it compares with PD instances alone."""
    plan, deployment = fleet.plan, fleet.deployment
    split = plan.splits[0]
    counts = [f"{split.cluster}: {split.num_prefill:.0f} prefill, {split.num_decode:.0f} decode"]
    counts += [f"{cluster.name}: {cluster.num_instances} prefill" for cluster in deployment.prfaas]
    thousand = 1000 / 3600 / demand.requests_per_second
    costs = f"{fleet.per_hour:,.2f} an hour, {fleet.per_hour * thousand:,.2f} per thousand requests: instances"
    costs += f" {fleet.instances_per_hour:,.2f}, egress {fleet.egress_per_hour:,.2f}"
    costs += f" ({show_gbps(fleet.egress_bytes_per_second)})"
    rows = [
        ("fleet", "; ".join(counts) + " (instances)"),
        ("plan", _routing(deployment, plan)),
        ("serves", f"{demand.requests_per_second:g} req/s, {demand.utilisation:.0%} of what it sustains"),
        ("costs", costs),
        ("instead", _instead(fleet, local)),
        ("inferred", "; ".join(study.inferred)),
    ]
    return "\n".join(f"{label:<9} {text}" for label, text in rows if text) + "\n"


def _instead(fleet: Fleet, local: Fleet | None) -> str:
    if not fleet.deployment.prfaas:
        return "nothing is cheaper: prefill elsewhere does not pay at these prices"
    if local is None:
        return "PD instances alone, up to three times as many, do not serve this"
    more = local.per_hour / fleet.per_hour - 1
    count = local.deployment.pd[0].num_instances
    return f"{count} PD instances alone cost {local.per_hour:,.2f} an hour ({more:+.1%})"


def _routing(deployment: Deployment, plan: Plan) -> str:
    remote = " and ".join(cluster.name for cluster in deployment.prfaas)
    if not remote or not plan.offload_ratio:
        return "every prompt is prefilled in the PD clusters"
    if plan.threshold_tokens is None:
        return f"every prompt is prefilled by {remote}"
    return (
        f"prompts of more than {plan.threshold_tokens:,} uncached tokens go to {remote}"
        f" ({plan.offload_ratio:.1%} of the requests, {show_gbps(plan.egress_bytes_per_second or 0.0)} when busy)"
    )


def _roles(study: Study) -> str:
    splits = [
        f"{split.cluster}: {_count(split.num_prefill).format(split.num_prefill)} prefill,"
        f" {_count(split.num_decode).format(split.num_decode)} decode"
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
    same = study.at_equal_cost
    if same is None or not study.main.deployment.prfaas:
        return text
    rate = same.plan.system_throughput
    return f"{text}; the same money in instances of {same.deployment.pd[0].name} sustains {rate:.2f} req/s"


_LIMITS = {"prfaas": "remote prefill", "link": "the links", "pd-prefill": "local prefill", "pd-decode": "decode"}


def _purchase(study: Study) -> str:
    """Return what limits the plan, and the resource that adds most: per price of an instance if all prices are known."""
    limit = f"{_LIMITS[study.main.plan.limit]}"
    instances = {name: value for name, value in study.duals.items() if name.startswith("instance:") and value > 0}
    if not instances:
        return limit
    prices = {f"instance:{cluster.name}": cluster.price_per_hour for cluster in study.main.deployment.clusters}
    best = max(instances, key=lambda name: instances[name] / (prices[name] or 1.0))
    text = f"{limit}; one more instance of {best.partition(':')[2]} adds {instances[best]:.2f} req/s"
    links = {name: value for name, value in study.duals.items() if name.startswith("gbps:") and value > 1e-3}
    if links:
        link = max(links, key=lambda name: links[name])
        text += f", one more Gbit/s of {link.partition(':')[2]} {links[link]:.2f}"
    return text


def _table(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Return aligned columns: the first to the left, the rest to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _inputs(study: Study) -> str:
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
    return "\n".join([*lines, "", _table(rows)])


def _mark(inferred: Sequence[str]) -> str:
    return "inferred" if inferred else ""


def _count(number: float) -> str:
    """Return the format of a number of instances: whole numbers without decimals."""
    return "{:.0f}" if abs(number - round(number)) < 1e-6 else "{:.2f}"


def _split(plan: Plan) -> str:
    return "/".join(_count(number).format(number) for number in (plan.num_prefill, plan.num_decode))


def _cell(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)


def _options(study: Study) -> str:
    columns = [figures(option) for option in study.options]
    rows = [["", *(option.deployment.name for option in study.options)]]
    rows += [[label, *(_cell(column[name], form) for column in columns)] for name, (label, form) in _FIGURES.items()]
    if len(study.main.plan.splits) > 1:
        splits = ", ".join(f"{s.cluster} {s.num_prefill:g}/{s.num_decode:g}" for s in study.main.plan.splits)
        return _table(rows) + f"\n  splits N_p/N_d: {splits}"
    return _table(rows)


def _cost(study: Study) -> str:
    if study.main.price_per_hour is None:
        return ""
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
    return _table(rows)


def _bound(study: Study) -> str:
    lines = [
        "bound over every routing policy (linear program over lengths and stations)",
        f"  whole instances  {study.integer.system_throughput:.4f} req/s; the plan is {max(study.gap, 0):.4%} below it",
        f"  roles free       {study.fractional.system_throughput:.4f} req/s, with N_p ="
        f" {', '.join(f'{n:.2f}' for n in study.fractional.solution.num_prefill)}",
    ]
    rows = [["one more", "is worth with roles free"]]
    for name, value in study.duals.items():
        kind, _, where = name.partition(":")
        label = f"instance of {where}" if kind == "instance" else f"Gbps of {where}"
        rows.append([label, f"{value:+.4f} req/s"])
    return "\n".join([*lines, _table(rows)])


def _queueing(study: Study) -> str:
    rate, plan = study.arrivals_per_second, study.main.plan
    rows = [["TTFT", "no queue, mean", "P90", "with queues, mean", "P90"]]
    for option in study.options:
        free, queued = option.queue_free, option.queued
        times = (free.mean_seconds, free.quantile_seconds, queued.mean_seconds, queued.quantile_seconds)
        rows.append([option.deployment.name, *(show_seconds(time) for time in times)])
    title = f"at {rate:.2f} req/s ({rate / plan.system_throughput:.0%} of PrfaaS-PD's Λ_max), Poisson arrivals, M/G/k"
    lines = [title, _table(rows)]
    if study.slo_rate is not None:
        lines.append(
            f"  the TTFT objective holds up to {study.slo_rate:.2f} req/s ({study.slo_rate / plan.system_throughput:.0%})"
        )
    return "\n".join(lines)


def _sensitivity(study: Study) -> str:
    if study.sensitivity is None:
        return ""
    base = study.sensitivity.base.system_throughput
    rows = [["if an input is", "-20 %", "t, N_p/N_d", "+20 %", "t, N_p/N_d"]]
    for name, plans in study.sensitivity.plans.items():
        row = [name]
        for plan in plans:
            if plan is None:
                row += ["no plan", _NONE]
                continue
            threshold = _NONE if plan.threshold_tokens is None else show_tokens(plan.threshold_tokens)
            row += [f"{plan.system_throughput / base - 1:+.1%}", f"{threshold}, {_split(plan)}"]
        rows.append(row)
    return "Λ_max when planned anew\n" + _table(rows)


def _notes(study: Study) -> str:
    lines = [f"inferred: {name}" for name in study.inferred] + [f"note: {note}" for note in study.notes]
    return "\n".join(lines)
