"""Small deployments and random ones for the scheduler's tests."""

import json

from hypothesis import strategies as st

from prfaas.scheduler.ppd import PpdEntry, PpdTable
from prfaas.scheduler.snapshot import InstanceState, PathState, RequestFacts, Snapshot
from prfaas.scheduler.threshold import PathCost
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole

T = 1000
EAST_CLUSTER, WEST_CLUSTER = ClusterName("east"), ClusterName("west")


def instance(
    name: str, kind: ClusterKind, role: InstanceRole, *, healthy: bool = True, load: int = 0, cluster: str = ""
) -> InstanceState:
    """Return one of east's (prfaas) or west's (pd), on a node of its own."""
    own = ClusterName(cluster) if cluster else EAST_CLUSTER if kind == "prfaas" else WEST_CLUSTER
    return InstanceState(InstanceId(name), own, kind, role, AgentName(f"agent-{name}"), healthy, load)


EAST = instance("e", "prfaas", "prefill")
WEST = instance("w", "pd", "both")
PD_P = instance("p", "pd", "prefill")
SLOW = PathCost(1e3, 1e6, 1e3, 0.0, 1e-4)  # A megabyte of state over a kilobyte per second.
FAST = PathCost(1e12, 1e6, 1e3, 0.0, 1e-4)
ENTRY = PpdEntry("small", "mid_bal", 1.0, 0.2, 0.1, 0.010, 0.011)
TABLE = PpdTable((ENTRY,))


def prefix_decider(limit: int) -> str:
    """An EndpointPickerConfig whose decider has PD-P prefill what lacks so many tokens; the emptiest instance decodes."""
    decode = [{"pluginRef": "decode-filter"}, {"pluginRef": "queue-scorer"}]
    prefill = [{"pluginRef": "prefill-filter"}]
    decider = {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": limit}}
    handler = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "prefix-based-pd-decider"}}}
    plugins = [*({"type": kind} for kind in ("decode-filter", "prefill-filter", "queue-scorer")), decider, handler]
    profiles = [{"name": "decode", "plugins": decode}, {"name": "prefill", "plugins": prefill}]
    head = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
    return json.dumps(head | {"plugins": plugins, "schedulingProfiles": profiles})


instances = st.builds(
    instance,
    st.sampled_from("abcdef"),
    st.sampled_from(["prfaas", "pd"]),
    st.sampled_from(["prefill", "decode", "both"]),
    healthy=st.booleans(),
    load=st.integers(0, 20),
)
costs = st.builds(
    PathCost,
    st.floats(0, 1e9),
    st.floats(0, 1e8),
    st.floats(0, 1e6),
    st.floats(0, 1),
    st.floats(0, 1e-3),
    st.floats(0, 1e-8),
)
paths = st.builds(
    PathState, st.just(EAST_CLUSTER), st.just(WEST_CLUSTER), st.integers(0, 3 * T), st.booleans(), st.none() | costs
)
snapshots = st.builds(
    Snapshot,
    st.integers(0, 3 * T),
    st.lists(instances, max_size=6, unique_by=lambda instance: instance.instance).map(tuple),
    st.sampled_from([frozenset(), frozenset([(EAST_CLUSTER, WEST_CLUSTER)])]),
    st.lists(paths, max_size=1).map(tuple),
    st.sampled_from(["decode", "pd", "ppd", "static", "endpoint_picker"]),
    st.none() | st.just(TABLE),
    st.floats(0, 50),
    st.sampled_from([0, T]).map(lambda limit: prefix_decider(limit)),
    st.floats(0, 1),
)
agents = st.sampled_from([AgentName(f"agent-{name}") for name in "abcdef"])
facts = st.integers(1, 5 * T).flatmap(
    lambda total: st.builds(
        RequestFacts,
        st.just(total),
        st.booleans(),
        st.just(0),
        st.sampled_from([None, "media"]),
        st.dictionaries(agents, st.integers(0, total - 1), max_size=6),
        st.none() | agents,
        st.frozensets(st.sampled_from([InstanceId(name) for name in "abcdef"]), max_size=3),
        st.integers(0, 3),
        st.integers(0, 500),
        st.booleans(),
    )
)
