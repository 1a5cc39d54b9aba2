"""Status pages of routers and agents, for deployments whose managers do not answer, or that have none."""

from dataclasses import dataclass
from typing import Any

from prfaas.config import default
from prfaas.console import tables
from prfaas.console.config import ConsoleConfig
from prfaas.console.pages import read_json, tls_of
from prfaas.errors import PageUnreachable
from prfaas.router.http.admission import read_key

_POOL = ("prefix", "transfer", "quarantined", "free")
_ROUTER_PAGE = "/health"


@dataclass(frozen=True)
class Components:
    """Pages of the routers and agents that answer, by URL, and errors of all others."""

    routers: dict[str, dict[str, Any]]
    agents: dict[str, dict[str, Any]]
    failures: tuple[str, ...]

    @property
    def state(self) -> dict[str, Any]:
        """Return the agents' links in the form of a manager's state."""
        return {
            "nodes": [{"node": {"name": a["name"], "cluster": ""}, "links": a["links"]} for a in self.agents.values()]
        }

    def document(self) -> dict[str, Any]:
        return {"routers": self.routers, "agents": self.agents, "unanswered": list(self.failures)}

    def status_tables(self) -> list[tables.Table]:
        """Return the instances of each router, and the pool and transfers of each agent."""
        instances = [
            (url, name, "answers" if answers else "does not answer")
            for url, page in self.routers.items()
            for name, answers in page.get("instances", {"see router_key_file": page["status"] == "ok"}).items()
        ]
        moods = tuple[tables.Mood, ...]("plain" if row[-1] == "answers" else "bad" for row in instances)
        return [
            tables.Table("Instances", ("router", "instance", "state"), tuple(instances), moods),
            self.pool_table("sending", "receiving"),
            *tables.unanswered_tables(self.failures),
        ]

    def pool_table(self, *counts: str) -> tables.Table:
        """Return the slots of each agent's pool by use, after other counts of its page."""
        rows = tuple(
            (page["name"], *(str(page[key]) for key in counts), *(str(page["pool"][key]) for key in _POOL))
            for page in self.agents.values()
        )
        return tables.Table("Agents", ("agent", *counts, *(f"{key} slots" for key in _POOL)), rows)


def ask_components(settings: ConsoleConfig, unanswered: PageUnreachable) -> Components:
    """Ask routers and agents in the managers' place.

    Raises:
        PageUnreachable: none of them answers either; the managers' error.
    """
    failures = [str(unanswered)] if settings.managers else []
    usual = {*default(ConsoleConfig, "routers"), *default(ConsoleConfig, "agents")}
    found: dict[str, dict[str, Any]] = {}
    key = read_key(settings.router_key_file, setting="router_key_file")
    paths = dict.fromkeys(settings.agents, "/status") | dict.fromkeys(settings.routers, _ROUTER_PAGE)
    for url, path in paths.items():
        tls = tls_of(settings.tls)
        if tls is not None:
            tls.load_default_certs()  # A router may show its clients a publicly trusted certificate.
        try:
            page = read_json(
                url.rstrip("/") + path,
                timeout_seconds=settings.timeout,
                tls=tls,
                key=key if path == _ROUTER_PAGE else "",
                may_be_unavailable=True,
            )
        except PageUnreachable as error:
            if url not in usual:  # A machine may have no router, or no agent.
                failures.append(str(error))
            continue
        if page is not None:
            found[url] = page
    if not found:
        raise unanswered
    routers = {url: found[url] for url in settings.routers if url in found}
    return Components(routers, {url: found[url] for url in settings.agents if url in found}, tuple(failures))
