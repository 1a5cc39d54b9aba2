"""Deployment files (YAML): clusters, links, objectives, prices and traffic."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from prfaas import config
from prfaas.config import record, records, setting
from prfaas.errors import ConfigError
from prfaas.model.cost.colocation import ALTERNATING, Frontier
from prfaas.model.cost.egress_price import ByHour, EgressPrice
from prfaas.model.cost.profile import Profile
from prfaas.model.cost.roofline import roofline
from prfaas.model.deployment import ClusterPath, Deployment, Objectives, PdCluster, PrfaasCluster, TenantShare
from prfaas.model.kv import huggingface
from prfaas.model.kv.geometry import Geometry
from prfaas.solve.files import catalog
from prfaas.solve.files.quantities import EGRESS_PRICE, NUMBER, PRICE_BY_HOUR, TOKENS_PER_SECOND
from prfaas.units import choice, parse_seconds, parse_tokens


@dataclass(frozen=True)
class ClusterSection:
    """Settings of every cluster."""

    name: str = setting("text", required=True, doc="Name of the cluster.")
    profile: str = setting("text", default="", doc="Measured profile: a catalogued name or a YAML file.")
    hardware: str = setting(
        "text", default="", doc="In place of a profile: a GPU of the table, whose times are inferred."
    )
    gpus_per_instance: int = setting("count", default=8, minimum=1, doc="With `hardware`: GPUs of one instance.")
    measured: str = setting("text", default="", doc='With `hardware`: one measured prefill, such as "32K=2.1s".')
    instances: int = setting("count", required=True, minimum=1, doc="Number of instances.")
    price: float | None = setting(NUMBER, default=None, doc="Price of one instance for an hour, in any currency.")
    power: float = setting(NUMBER, default=0.0, doc="Power of one instance in kW, with cooling.")
    power_price: ByHour | None = setting(
        PRICE_BY_HOUR, default=None, doc='Price of a kWh, counted beside `price`: "0.12", "0.12, 0.08@22-6".'
    )
    carbon: float = setting(NUMBER, default=0.0, doc="Kilograms of CO2 per kWh.")
    carbon_price: float = setting(NUMBER, default=0.0, doc="Price of a tonne of CO2, counted beside `price`.")

    @property
    def energy_price(self) -> float:
        """Return what power and carbon of one instance cost in an hour, on average over the day."""
        per_kwh = self.power_price.mean if self.power_price is not None else 0.0
        return self.power * (per_kwh + self.carbon * self.carbon_price / 1000.0)


@dataclass(frozen=True)
class PrfaasSection(ClusterSection):
    """PrfaaS cluster."""

    bandwidth: float | None = setting("rate", default=None, minimum=1, doc="Egress over all links; empty: no limit.")
    egress_price: EgressPrice | None = setting(
        EGRESS_PRICE, default=None, doc='Price of a GB that leaves: "0.05", "0.05, 0.02@22-6" with hours of the day.'
    )


@dataclass(frozen=True)
class PdSection(ClusterSection):
    """PD cluster."""

    REMOVED_SETTINGS: ClassVar[Mapping[str, str]] = {
        "intra_bandwidth": "a note of the plan says what the network inside a PD cluster must carry"
    }

    prefill_instances: int | None = setting("count", default=None, doc="Fixes N_p; empty: the planner chooses.")
    shared_instances: int = setting("count", default=0, doc="Instances that may prefill and decode at once.")
    overlap: float | None = setting(
        "ratio", default=None, doc="Extra work of a shared instance over one role at a time; empty: as in its profile."
    )


@dataclass(frozen=True)
class LinkSection:
    """Path between two clusters; the key in the file is `links`."""

    source: str = setting("text", required=True, doc="A PrfaaS cluster.")
    target: str = setting("text", required=True, doc="A PD cluster.")
    bandwidth: float = setting("rate", required=True, minimum=1, doc="Rate of the path.")
    egress_price: EgressPrice | None = setting(
        EGRESS_PRICE, default=None, doc="In place of the cluster's; of several links the dearest price counts."
    )


@dataclass(frozen=True)
class TenantSection:
    """Tenant that is bound to some clusters; the key in the file is `tenants`."""

    name: str = setting("text", required=True, doc="Name of the tenant.")
    share: float = setting("ratio", required=True, doc="Its share of the requests.")
    clusters: tuple[str, ...] = setting("text_list", required=True, doc="Clusters that may see its prompts and KV.")


@dataclass(frozen=True)
class SloSection:
    """Service-level objectives."""

    decode: float = setting(TOKENS_PER_SECOND, default=40.0, minimum=1e-6, doc="Least decoding speed of a request.")
    ttft: float | None = setting("seconds", default=None, doc="Longest time to first token; empty: no bound.")
    quantile: float = setting("ratio", default=0.9, doc="Share of requests within `ttft`.")


@dataclass(frozen=True)
class DeploymentFile:
    """Deployment and its traffic, as written in a file."""

    model: str = setting("text", required=True, doc="A catalogued model or a Hugging Face config.json.")
    kv_dtype: str = setting(
        choice("auto", *huggingface.ELEMENT_BYTES),
        default="auto",
        doc="Type of keys and values; auto: the model's own.",
    )
    trace: str = setting("text", default="lognormal", doc="Traffic in a form of --trace.")
    currency: str = setting("text", default="", doc='Currency of all prices, such as "USD".')
    inferred: tuple[str, ...] = setting("text_list", default=(), doc="Inputs here that were not measured or agreed.")
    prfaas: tuple[PrfaasSection, ...] = setting(records(PrfaasSection), default=(), doc="PrfaaS clusters.")
    pd: tuple[PdSection, ...] = setting(records(PdSection), required=True, doc="PD clusters.")
    links: tuple[LinkSection, ...] = setting(records(LinkSection), default=(), doc="Paths; empty: between all pairs.")
    tenants: tuple[TenantSection, ...] = setting(
        records(TenantSection), default=(), doc="Tenants that may not use all clusters, as in the router's settings."
    )
    slo: SloSection = setting(record(SloSection), doc="Service-level objectives.")


def read_deployment(file: Path, *, model: str | None = None) -> tuple[Deployment, DeploymentFile]:
    """Return the deployment of a YAML file, and the file as written; `model` replaces the file's.

    Raises:
        ConfigError: the file cannot be read, or names a model or profile that does not exist.
    """
    written = config.load_file(DeploymentFile, file)
    if model is not None:
        written = replace(written, model=model)
    return deployment_of(written, where=str(file), folder=file.parent), written


def deployment_of(written: DeploymentFile, *, where: str, folder: Path) -> Deployment:
    """Return the deployment that the settings describe; files are relative to `folder`.

    Raises:
        ConfigError: a model, profile or GPU does not exist, or the settings contradict each other.
    """
    model = catalog.find_model(written.model, beside=folder, kv_dtype=written.kv_dtype)
    deployment = Deployment(
        name="prfaas-pd",
        model=model,
        prfaas=tuple(_prfaas(section, written.links, model, folder) for section in written.prfaas),
        pd=tuple(_pd(section, model, folder) for section in written.pd),
        paths=tuple(ClusterPath(link.source, link.target, link.bandwidth) for link in written.links),
        tenants=tuple(TenantShare(each.name, each.share, frozenset(each.clusters)) for each in written.tenants),
        objectives=Objectives(written.slo.decode, written.slo.ttft, written.slo.quantile),
    )
    _check(deployment, where)
    return deployment


def _profile(section: ClusterSection, model: Geometry, folder: Path) -> tuple[Profile, float | None]:
    """Return a cluster's profile and the price of one instance: measured, or inferred from its hardware."""
    if bool(section.profile) == bool(section.hardware):
        raise ConfigError(f"cluster {section.name!r}: write either a profile or the hardware")
    if section.profile:
        if section.measured:
            raise ConfigError(f"cluster {section.name!r}: measured: needs hardware; a profile is measured already")
        found = catalog.find_profile(section.profile, beside=folder)
        profile = catalog.profile_of_model(found, model, cluster=section.name)
        return profile, None if section.price is None else section.price + section.energy_price
    gpu, count = catalog.find_gpu(section.hardware), section.gpus_per_instance
    profile = roofline(model, gpu, count, measured=_measured(section), name=f"{section.name} ({count} {gpu.name})")
    price = gpu.price * count if section.price is None else section.price
    return profile, price + section.energy_price


def _measured(section: ClusterSection) -> tuple[float, float] | None:
    """Return tokens and seconds of the measured prefill."""
    if not section.measured:
        return None
    tokens, _, seconds = section.measured.partition("=")
    try:
        return float(parse_tokens(tokens.strip())), parse_seconds(seconds.strip())
    except ValueError as error:
        raise ConfigError(f'cluster {section.name!r}: measured: {error}; write "32K=2.1s"') from error


def _prfaas(section: PrfaasSection, links: Sequence[LinkSection], model: Geometry, folder: Path) -> PrfaasCluster:
    egress = math.inf if section.bandwidth is None else section.bandwidth
    profile, price = _profile(section, model, folder)
    prices = [link.egress_price or section.egress_price for link in links if link.source == section.name]
    known = [each for each in prices or [section.egress_price] if each is not None]
    dearest = max(known, key=lambda each: each.mean, default=None)
    return PrfaasCluster(
        section.name, profile, section.instances, egress, price, dearest, section.power, section.carbon
    )


def _pd(section: PdSection, model: Geometry, folder: Path) -> PdCluster:
    profile, price = _profile(section, model, folder)
    return PdCluster(
        name=section.name,
        profile=profile,
        num_instances=section.instances,
        num_prefill=section.prefill_instances,
        shared_instances=section.shared_instances,
        frontier=_frontier(section, profile),
        price_per_hour=price,
        kilowatts=section.power,
        carbon_per_kwh=section.carbon,
    )


def _frontier(section: PdSection, profile: Profile) -> Frontier:
    if section.overlap is not None:
        return Frontier.through((section.overlap, 1.0), (1.0, section.overlap))
    return profile.sharing.frontier if profile.sharing else ALTERNATING


def _check(deployment: Deployment, file: str) -> None:
    names = [cluster.name for cluster in deployment.clusters]
    if not deployment.pd:
        raise ConfigError(f"{file}: pd: at least one PD cluster is needed to decode")
    if len(set(names)) != len(names):
        raise ConfigError(f"{file}: two clusters have the same name")
    for cluster in deployment.pd:
        if max(cluster.num_prefill or 0, cluster.shared_instances) > cluster.num_instances:
            raise ConfigError(f"{file}: PD cluster {cluster.name!r} has only {cluster.num_instances} instances")
    sources, targets = {c.name for c in deployment.prfaas}, {c.name for c in deployment.pd}
    for path in deployment.paths:
        if path.source not in sources or path.target not in targets:
            raise ConfigError(
                f"{file}: links: {path.source} -> {path.target}: not a PrfaaS cluster and a PD cluster of this file"
            )
    _check_tenants(deployment, file)
    if deployment.model.kv_bytes(1) <= 0:
        raise ConfigError(f"{file}: model {deployment.model.name!r} keeps no KV at all")


def _check_tenants(deployment: Deployment, file: str) -> None:
    known, pd = ({cluster.name for cluster in clusters} for clusters in (deployment.clusters, deployment.pd))
    for tenant in deployment.tenants:
        if not tenant.clusters <= known or not tenant.clusters & pd:
            raise ConfigError(f"{file}: tenants: {tenant.name}: clusters must be of this file, a PD cluster among them")
    if sum(tenant.ratio for tenant in deployment.tenants) > 1.0 + 1e-9:
        raise ConfigError(f"{file}: tenants: shares add up to 100% at most")
