"""Check of a router's cluster against the live nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prfaas.console.doctor.finding import Finding, bad, good
from prfaas.router.config import RouterConfig

Nodes = Sequence[Mapping[str, Any]]  # Nodes of a manager's /state.


def router_finding(router: RouterConfig, nodes: Nodes) -> Finding:
    """Check that a router's cluster has live nodes."""
    live = sorted({node["cluster"] for node in nodes if node["cluster_kind"] == "pd"})
    if router.cluster and router.cluster not in live:
        message = f"managers know no PD cluster {router.cluster}; every request would be refused (no_decode_instance)"
        known = f"write cluster: {' or '.join(live)}" if live else "name these managers in the settings of its agents"
        return bad("cluster", "router", message, remedy=f"{known}; start the agents of {router.cluster}; prfaas status")
    return good("cluster", "router", f"live PD clusters: {', '.join(live) or 'none'}")
