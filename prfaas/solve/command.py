"""Deployment, workload and study for the flags of `prfaas-solve`."""

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from prfaas import config
from prfaas.errors import ConfigError
from prfaas.model.cost.egress_price import DAY_HOURS, day_parts
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment, Objectives, PdCluster, PrfaasCluster
from prfaas.model.planning.fleet import Demand, cheapest_day, greatest_demand, resized_day
from prfaas.solve.files import catalog
from prfaas.solve.files.deployment_file import (
    DeploymentFile,
    PdSection,
    PrfaasSection,
    SloSection,
    deployment_of,
    read_deployment,
)
from prfaas.solve.files.quantities import DEMAND, EGRESS_PRICE, LOAD, NUMBER
from prfaas.solve.files.traces import find_trace
from prfaas.solve.study import FleetAnswer, Study, inferred_inputs, study
from prfaas.units import KINDS, ValueKind

C = TypeVar("C", PrfaasCluster, PdCluster)


def plan_for(flags: Namespace) -> Study:
    """Return the study for the command line, with a fleet for --demand or --budget; flags override the deployment's file.

    Raises:
        ConfigError: a flag, a file or an objective that cannot be used, or no fleet serves the demand.
    """
    file = catalog.deployment_path(catalog.CASE_STUDY) if flags.deployment is None else Path(flags.deployment)
    if flags.pd is None:
        deployment, written = read_deployment(file, model=flags.model)
    else:
        written = _described(flags)
        deployment = deployment_of(written, where="--pd", folder=Path())
    workload = find_trace(flags.trace or written.trace, beside=None if flags.trace else file.parent)
    deployment, load = _overridden(deployment, flags), _parse("--load", flags.load, LOAD)
    if flags.demand is None and flags.budget is None:
        return study(deployment, workload, load=load, inferred=written.inferred)
    utilisation = load[1] if load[0] == "ratio" else 0.8
    find = _best_for_budget if flags.demand is None else _cheapest_for
    answer = find(flags, deployment, workload, utilisation)
    demand, fleet = answer.day.demands[0], answer.day.parts[0]
    found = study(
        fleet.deployment,
        workload,
        plan=fleet.plan,
        load=("rate", demand.requests_per_second),
        hour=demand.hour,
        inferred=(*written.inferred, *inferred_inputs(deployment, workload)),
    )
    return replace(found, fleet=answer)


# "16xH100", or "16xH100:4" for instances of 4 GPUs.
_GPUS = re.compile(r"(\d+)x([A-Za-z0-9]+)(?::(\d+))?")


def _described(flags: Namespace) -> DeploymentFile:
    """Return the deployment that --model, --prfaas and --pd describe; its prices are those of the table of GPUs."""
    if flags.deployment is not None or flags.model is None:
        raise ConfigError("--pd: needs --model, and no --deployment")
    prfaas = tuple(
        PrfaasSection(name=f"prfaas-{gpu.lower()}", hardware=gpu, gpus_per_instance=each, instances=count)
        for gpu, each, count in _gpu_groups("--prfaas", flags.prfaas or "")
    )
    pd = tuple(
        PdSection(name=f"pd-{gpu.lower()}", hardware=gpu, gpus_per_instance=each, instances=count)
        for gpu, each, count in _gpu_groups("--pd", flags.pd)
    )
    return DeploymentFile(model=flags.model, prfaas=prfaas, pd=pd, inferred=("prices",), slo=SloSection())


def _gpu_groups(flag: str, text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the GPU, the GPUs of one instance and the number of instances of each cluster of a text such as "16xH100"."""
    for item in filter(None, map(str.strip, text.split(","))):
        parts = _GPUS.fullmatch(item)
        if parts is None:
            raise ConfigError(f'{flag} {text!r}: write "16xH100", or "16xH100:4" for instances of 4 GPUs')
        count, gpu, each = int(parts[1]), parts[2], int(parts[3] or min(8, int(parts[1])))
        if not each or count % each or not count:
            raise ConfigError(f"{flag} {text!r}: {count} GPUs are no whole number of instances of {each}")
        yield gpu, each, count // each


def _cheapest_for(flags: Namespace, deployment: Deployment, workload: Workload, utilisation: float) -> FleetAnswer:
    """Return the cheapest fleets for the demand of the command line."""
    curve, prices = _parse("--demand", flags.demand, DEMAND), [c.egress_price for c in deployment.prfaas]
    parts = day_parts([curve, *filter(None, prices)]) if curve.periods else [(0.0, DAY_HOURS)]
    hours = [flags.hour if not curve.periods else start for start, _ in parts]
    demands = [
        Demand(curve.at(start), utilisation, hour, end - start)
        for (start, end), hour in zip(parts, hours, strict=True)
        if curve.at(start)
    ]
    if not demands:
        raise ConfigError(f"--demand {flags.demand!r}: write {DEMAND.accepted}")
    day = cheapest_day(deployment, workload, demands)
    if day is None:
        raise ConfigError(f"--demand {flags.demand!r}: three times the instances do not serve it within the objectives")
    local = cheapest_day(deployment, workload, demands, only_local=True)
    resized = resized_day(deployment, workload, demands) if len(demands) > 1 else None
    return FleetAnswer(day, local, resized)


def _best_for_budget(flags: Namespace, deployment: Deployment, workload: Workload, utilisation: float) -> FleetAnswer:
    """Return the fleets that serve most for the budget of the command line."""
    budget = _parse("--budget", flags.budget, NUMBER)
    day, local = (
        greatest_demand(deployment, workload, budget, utilisation=utilisation, only_local=only_local)
        for only_local in (False, True)
    )
    if day is None:
        raise ConfigError(f"--budget {flags.budget!r}: buys no fleet that serves a request")
    return FleetAnswer(day, local)


def _parse(flag: str, text: str, kind: ValueKind) -> Any:
    try:
        return kind.parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}; write {kind.accepted}") from error


def _overridden(deployment: Deployment, flags: Namespace) -> Deployment:
    if flags.bandwidth is not None:
        deployment = _with_bandwidth(deployment, flags.bandwidth)
    if flags.egress_price is not None:
        price = _parse("--egress-price", flags.egress_price, EGRESS_PRICE)
        clusters = tuple(replace(cluster, egress_price=price) for cluster in deployment.prfaas)
        deployment = replace(deployment, prfaas=clusters)
    if flags.slo is not None:
        deployment = replace(deployment, objectives=_objectives(flags.slo, deployment.objectives))
    if flags.prices is not None:
        deployment = _with_prices(deployment, flags.prices)
    return deployment


def _with_bandwidth(deployment: Deployment, text: str) -> Deployment:
    rate = _parse("--bandwidth", text, KINDS["rate"])
    if not rate:
        raise ConfigError(f"--bandwidth {text!r}: must be above 0")
    clusters = tuple(replace(cluster, egress_bytes_per_second=rate) for cluster in deployment.prfaas)
    return replace(deployment, prfaas=clusters, paths=())


def _pairs(flag: str, text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    if not pairs or not all(separator for _, separator, _ in pairs):
        raise ConfigError(f"{flag} {text!r}: write key=value,key=value")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _objectives(text: str, current: Objectives) -> Objectives:
    """Return objectives with the values of text such as "decode=40tok/s,ttft=5s,quantile=90%" replaced."""
    values = _pairs("--slo", text)
    section = config.load_mapping(SloSection, values, where="--slo")
    return Objectives(
        section.decode if "decode" in values else current.decode_tokens_per_second,
        section.ttft if "ttft" in values else current.ttft_seconds,
        section.quantile if "quantile" in values else current.ttft_quantile,
    )


def _with_prices(deployment: Deployment, text: str) -> Deployment:
    """Set prices per instance and hour from text such as "h200=4,h20=1.5", by name of cluster or hardware."""
    prices = {key.lower(): value for key, value in _pairs("--prices", text).items()}
    known = {name.lower() for cluster in deployment.clusters for name in (cluster.name, cluster.profile.hardware)}
    unknown = sorted(set(prices) - known)
    if unknown:
        raise ConfigError(
            f"--prices: {unknown[0]!r} is neither a cluster nor hardware here; known are {', '.join(sorted(known))}"
        )
    return replace(
        deployment,
        prfaas=tuple(_priced(cluster, prices) for cluster in deployment.prfaas),
        pd=tuple(_priced(cluster, prices) for cluster in deployment.pd),
    )


def _priced(cluster: C, prices: dict[str, str]) -> C:
    text = prices.get(cluster.name.lower(), prices.get(cluster.profile.hardware.lower()))
    return cluster if text is None else replace(cluster, price_per_hour=_parse("--prices", text, NUMBER))
