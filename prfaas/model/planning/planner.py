"""Best plan of a deployment and a workload, and the deployments that it is compared with."""

from dataclasses import replace

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.many_pd import ManyPd
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.single_pd import SinglePd


def best_plan(deployment: Deployment, workload: Workload) -> Plan:
    """Return the threshold and the splits that sustain most."""
    loads = LoadModel(deployment, workload)
    return SinglePd(loads).plan() if is_single(deployment) else ManyPd(loads).plan()


def is_single(deployment: Deployment) -> bool:
    """Return whether `SinglePd` can plan: there is one PD cluster, and all requests may use every cluster."""
    return len(deployment.pd) == 1 and not deployment.tenants


def homogeneous(deployment: Deployment, *, num_added: int | None = None) -> Deployment:
    """Return the deployment with PD instances instead of PrfaaS instances.

    `num_added` instances join the first PD cluster; by default one for each PrfaaS instance, as in the paper.
    """
    added = sum(cluster.num_instances for cluster in deployment.prfaas) if num_added is None else num_added
    first, *rest = (replace(cluster, num_prefill=None) for cluster in deployment.pd)
    grown = replace(first, num_instances=first.num_instances + added)
    return replace(deployment, name="homogeneous-pd", prfaas=(), pd=(grown, *rest), paths=())


def naive(deployment: Deployment) -> Deployment:
    """Return the deployment that prefills on the PrfaaS clusters only and decodes on the PD clusters only."""
    pd = tuple(replace(cluster, num_prefill=0) for cluster in deployment.pd)
    return replace(deployment, name="naive-heterogeneous-pd", pd=pd)


def equal_cost(deployment: Deployment) -> Deployment | None:
    """Return the homogeneous deployment that costs as much; None without prices."""
    first = deployment.pd[0]
    if deployment.price_per_hour is None or not first.price_per_hour:
        return None
    spent = sum(cluster.num_instances * (cluster.price_per_hour or 0.0) for cluster in deployment.prfaas)
    return homogeneous(deployment, num_added=int(spent / first.price_per_hour + 1e-9))
