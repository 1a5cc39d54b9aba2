"""Random deployments of several clusters, and the best plan of each by brute force."""

import itertools
import random

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.lengths import Lengths
from prfaas.model.cost.profile import Profile
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import ClusterPath, Deployment, Objectives, PdCluster, PrfaasCluster
from prfaas.model.planning.many_pd import ManyPd
from prfaas.model.planning.single_pd import SinglePd
from tests.support.planner_inputs import case_study, profile, workload


def random_case(seed: int) -> tuple[Deployment, Workload]:
    """Return one to three PD clusters and one to three PrfaaS clusters before a trace of at most ten lengths."""
    chance = random.Random(seed)
    remote = [
        PrfaasCluster(f"r{index}", _profile(chance), chance.randint(1, 4), _rate(chance))
        for index in range(chance.randint(1, 3))
    ]
    local = [PdCluster(f"p{index}", _profile(chance), chance.randint(1, 5)) for index in range(chance.randint(1, 3))]
    paths: list[ClusterPath] = []
    if chance.random() < 0.5:
        pairs = [(source.name, target.name) for source in remote for target in local]
        paths = [ClusterPath(*pair, _rate(chance)) for pair in pairs if chance.random() < 0.7]
    objectives = Objectives(chance.choice((20.0, 30.0, 40.0)))
    model = case_study()[0].model
    deployment = Deployment("prfaas-pd", model, tuple(remote), tuple(local), tuple(paths), objectives)
    lengths = [int(2 ** chance.uniform(7, 17)) for _ in range(chance.randint(2, 10))]
    return deployment, workload(Lengths(sorted(lengths)), output_tokens=chance.randint(64, 2048))


def _profile(chance: random.Random) -> Profile:
    return profile(chance.uniform(0.05, 0.6), 10 ** chance.uniform(-5, -3.5), 10 ** chance.uniform(-11, -9.3))


def _rate(chance: random.Random) -> float:
    return 10 ** chance.uniform(7.5, 10.3)


def brute_force(deployment: Deployment, traffic: Workload) -> float:
    """Return the most that any threshold and any whole splits sustain."""
    loads = LoadModel(deployment, traffic)
    lengths = [int(length) for length in loads.lengths.points(64)[0]]
    thresholds = sorted({loads.everything_offloaded, *lengths})
    counts = [range(pd.num_instances + 1) for pd in deployment.pd]
    if len(deployment.pd) == 1:
        single = SinglePd(loads)
        return max(single.sustained(t, n) for t in thresholds for n in counts[0])
    several = ManyPd(loads)
    return max(several.at(t, splits).system_throughput for t in thresholds for splits in itertools.product(*counts))
