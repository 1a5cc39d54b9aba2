"""Checks of this machine's settings against the live nodes: names, clusters, cluster kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prfaas.agent.config import AgentConfig
from prfaas.console.doctor.finding import Finding, bad, good
from prfaas.router.config import RouterConfig

Nodes = Sequence[Mapping[str, Any]]  # Nodes of a manager's /state.


def agent_findings(agent: AgentConfig, nodes: Nodes) -> Iterator[Finding]:
    """Check that managers would accept this agent together with the live nodes."""
    neighbours = [node for node in nodes if node["name"] != agent.name]
    yield _node_name(agent, nodes)
    yield from _instance_names(agent, neighbours)
    yield _cluster_kind(agent, neighbours)


def _node_name(agent: AgentConfig, nodes: Nodes) -> Finding:
    here = agent.advertise or agent.listen
    for node in nodes:
        if node["name"] == agent.name and node["wire_address"] != here:
            message = f"a live node at {node['wire_address']} is named {agent.name}; this agent would be at {here}"
            remedy = "write another name, unique in the deployment; restart this agent if it is that node"
            return bad("node_name", "agent", message, remedy=remedy)
    return good("node_name", "agent", f"no other live node is named {agent.name}")


def _instance_names(agent: AgentConfig, neighbours: Nodes) -> Iterator[Finding]:
    holders = {
        engine["instance"]: neighbour["name"] for neighbour in neighbours for engine in neighbour.get("engines", [])
    }
    for engine in agent.engines:
        if holder := holders.get(engine.instance):
            message = f"{engine.instance} belongs to the live node {holder}; managers refuse this agent"
            remedy = f"write instance: {agent.name}/0, or another name that is unique in the deployment"
            yield bad("instance_name", "agent", message, remedy=remedy)


def _cluster_kind(agent: AgentConfig, neighbours: Nodes) -> Finding:
    for neighbour in neighbours:
        if neighbour["cluster"] == agent.cluster and neighbour["cluster_kind"] != agent.cluster_kind:
            kind = neighbour["cluster_kind"]
            conflict = f"{neighbour['name']} reports {agent.cluster} as {kind}"
            message = f"cluster_kind is {agent.cluster_kind}, but {conflict}; managers refuse this agent"
            remedy = f"write cluster_kind: {kind}, or another cluster"
            return bad("cluster_kind", "agent", message, remedy=remedy)
    return good("cluster_kind", "agent", f"{agent.cluster} is {agent.cluster_kind}")


def router_finding(router: RouterConfig, nodes: Nodes) -> Finding:
    """Check that a router's cluster has live nodes."""
    live = sorted({node["cluster"] for node in nodes if node["cluster_kind"] == "pd"})
    if router.cluster and router.cluster not in live:
        message = f"managers know no PD cluster {router.cluster}; every request would be refused (no_decode_instance)"
        known = f"write cluster: {' or '.join(live)}" if live else "name these managers in the settings of its agents"
        return bad("cluster", "router", message, remedy=f"{known}; start the agents of {router.cluster}; prfaas status")
    return good("cluster", "router", f"live PD clusters: {', '.join(live) or 'none'}")
