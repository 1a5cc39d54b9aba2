"""Inputs for tests of the planner: the paper's case study and small deployments like it."""

from dataclasses import replace

from prfaas.model.cost.curve import polynomial
from prfaas.model.cost.lengths import Lengths, log_normal
from prfaas.model.cost.profile import DecodeProfile, PrefillProfile, Profile
from prfaas.model.cost.workload import OutputTokens, Workload, with_context
from prfaas.model.deployment import Deployment, PdCluster, PrfaasCluster
from prfaas.solve.files import catalog
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import parse_spec

PAPER_LENGTHS = log_normal(9.90, 1.00, 128, 131_072)


def case_study() -> tuple[Deployment, Workload]:
    """Return the deployment and the traffic of the paper's section 4."""
    deployment, written = read_deployment(catalog.deployment_path(catalog.CASE_STUDY))
    return deployment, parse_spec(written.trace)


def workload(lengths: Lengths, *, output_tokens: float = 1024) -> Workload:
    return Workload("test", lengths, with_context(OutputTokens(output_tokens), lengths))


def profile(constant: float, linear: float, quadratic: float = 0.0, *, scale: float = 1.0) -> Profile:
    """Return a profile with a prefill of constant + linear l + quadratic l² seconds; decode of 25 ms at a batch of 20."""
    prefill = PrefillProfile(polynomial(constant, linear, quadratic).times(scale), 1, 1e9)
    return Profile("test", "test", prefill, DecodeProfile(0.015, 0.0005), "test")


def small_deployment(
    remote: Profile, local: Profile, *, num_prfaas: int = 2, num_pd: int = 4, egress: float = 12.5e9
) -> Deployment:
    """Return a deployment of one PrfaaS cluster and one PD cluster."""
    model = case_study()[0].model
    prfaas = PrfaasCluster("remote", remote, num_prfaas, egress)
    return Deployment("prfaas-pd", model, (prfaas,), (PdCluster("local", local, num_pd),))


def with_links_as_wide(deployment: Deployment, egress: float) -> Deployment:
    """Return the deployment with another egress."""
    clusters = tuple(replace(cluster, egress_bytes_per_second=egress) for cluster in deployment.prfaas)
    return replace(deployment, prfaas=clusters)
