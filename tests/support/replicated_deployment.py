"""Deployment of two managers on one Redis, two nodes in each of two clusters, and one router, to be disturbed."""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import redis
from prometheus_client.parser import text_string_to_metric_families

from prfaas.index.store.redis_store import Keys, writer_address
from prfaas.manager.record.embedded_redis import find_server
from prfaas.types import ClusterName, InstanceRole
from prfaas.units import split_address
from tests.support.process_deployment import CLUSTERS, MODEL, ProcessDeployment
from tests.support.waiting import until, wait_until
from tools.demo.client import get_text
from tools.free_ports import free_address
from tools.processes import Child, Children
from tools.stack import Stack

T = 256
NODES = {"w0": "west", "w1": "west", "e0": "east", "e1": "east"}
LOOPBACK: Mapping[str, str] = dict.fromkeys(CLUSTERS, "127.0.0.1")
ROLES = ("decode agent", "prefill agent", "decode engine", "prefill engine", "manager", "redis")


class ReplicatedDeployment(ProcessDeployment):
    """Processes of one deployment. `hosts` has the address of each cluster; other components are in the west."""

    managers: list[Child]
    manager_grpcs: list[str]
    manager_urls: list[str]
    redis: Child
    redis_url: str
    router: Child

    def start(
        self,
        stack: Stack,
        *,
        far: tuple[Children, Stack] | None = None,
        hosts: Mapping[str, str] = LOOPBACK,
        engine_flags: Sequence[str] = (),
        pool_bytes: str = "256MiB",
        agents: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Start everything; the cluster "east" with `far` if that is given. `agents` has settings of single agents."""
        self._engine_flags = engine_flags
        self._children_of: dict[str, Children] = {}
        port = split_address(free_address())[1]
        command = [
            find_server(),
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(self._directory),
        ]
        self.redis = self.children.start("redis", command)
        self.redis_url = f"redis://127.0.0.1:{port}"
        settings = {"redis_url": self.redis_url, "threshold_tokens": T, "rebalance_bytes_per_second": "0Gbps"}
        if hosts["west"] != "127.0.0.1":
            settings["insecure_plaintext"] = True
        started = [
            stack.start_manager(f"manager-{number}", listen=_free(hosts["west"]), **settings) for number in range(2)
        ]
        for manager, _, url in started:
            stack.await_server(manager, url, path="/readyz")
        self.managers = [manager for manager, _, _ in started]
        self.manager_grpcs = [grpc for _, grpc, _ in started]
        self.manager_urls = [url for _, _, url in started]
        self.manager_url = self.manager_urls[1]
        for name, cluster in NODES.items():
            children, own_stack = far if far and cluster == "east" else (self.children, stack)
            settings = {"pool_bytes": pool_bytes, **agents.get(name, {})}
            self._start_node(name, cluster, children, own_stack, host=hosts[cluster], settings=settings)
        router = {"managers": self.manager_grpcs, "cluster": "west", "probe_interval": "500ms"}
        self.router, self.router_urls["west"] = stack.start_router(router)
        stack.await_server(self.router, self.router_urls["west"])
        wait_until(lambda: self._sees_all("west"), seconds=90.0, what="healthy engines")

    def _start_node(
        self, name: str, cluster: str, children: Children, stack: Stack, *, host: str, settings: Mapping[str, Any]
    ) -> None:
        role: InstanceRole = "prefill" if CLUSTERS[cluster] == "prfaas" else "both"
        instance, url = f"{name}/0", f"http://{_free(host)}"
        agent = stack.start_agent(
            name,
            listen=_free(host),
            managers=self.manager_grpcs,
            cluster=cluster,
            cluster_kind=CLUSTERS[cluster],
            engines=[{"instance": instance, "url": url, "role": role, "model": MODEL}],
            **settings,
        )
        self.agents[name], self.engine_urls[instance] = agent, url
        journal = f"--journal={self.journal(instance)}"
        command = self._engine_command(instance, url, agent, [*self._engine_flags, journal])
        self.engines[instance] = children.start(instance.replace("/", "-"), command)
        self._children_of |= dict.fromkeys((agent.child.name, self.engines[instance].name), children)

    def journal(self, instance: str) -> Path:
        """Return the file to which an engine appends the end of each transfer."""
        return self._directory / f"{instance.replace('/', '-')}.journal"

    def transfer_ends(self, side: str) -> dict[str, str]:
        """Return the outcomes at the engines' side, "sent", "received" or "fallback", by transfer id."""
        journals = [path for path in map(self.journal, self.engine_urls) if path.exists()]
        entries = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
        return {entry["transfer_id"]: entry["outcome"] for entry in entries if entry["side"] == side}

    def records(self) -> list[dict[str, Any]]:
        """Return the router's log lines about requests."""
        lines = [json.loads(line) for line in self.router.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == "request.complete"]

    def writers(self) -> dict[str, str]:
        """Return the address of the manager that writes each cluster."""
        client: Any = redis.Redis.from_url(self.redis_url)
        keys = {cluster: Keys().lease(ClusterName(cluster)) for cluster in CLUSTERS}
        owners = {cluster: client.hget(key, "owner") for cluster, key in keys.items()}
        client.close()
        return {cluster: writer_address(owner.decode()) for cluster, owner in owners.items() if owner}

    @property
    def processes(self) -> dict[str, Child]:
        """Processes by name."""
        return {
            "redis": self.redis,
            "router": self.router,
            **{f"manager {number}": manager for number, manager in enumerate(self.managers)},
            **{f"agent {name}": agent.child for name, agent in self.agents.items()},
            **{f"engine {instance}": child for instance, child in self.engines.items()},
        }

    def kill(self, name: str) -> None:
        """Kill an agent or an engine by its name in `processes`, and start it again."""
        kind, _, own = name.partition(" ")
        child = self.processes[name]
        children = self._children_of[child.name]
        restarted = children.kill_and_restart(child)
        if kind == "engine":
            self.engines[own] = restarted
        else:
            self.agents[own] = replace(self.agents[own], child=restarted)

    def child_of(self, role: str) -> Child:
        """Return one process of a role out of `ROLES`."""
        names = {
            "decode agent": "agent w0",
            "prefill agent": "agent e0",
            "decode engine": "engine w0/0",
            "prefill engine": "engine e0/0",
            "manager": "manager 0",
        }
        return self.processes[names.get(role, role)]


def sums(urls: Sequence[str], name: str, label: str) -> Counter[str]:
    """Return the sums of a counter over several pages, by one label."""
    found = Counter[str]()
    for url in urls:
        for family in text_string_to_metric_families(get_text(f"{url}/metrics")):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels[label]] += int(sample.value)
    return +found


async def until_sums_agree(site: ReplicatedDeployment) -> None:
    """Wait until the managers together have counted what the router has counted."""
    pairs = [
        ("prfaas_router_requests_total", "prfaas_manager_answered_requests_total", "outcome"),
        ("prfaas_router_decisions_total", "prfaas_manager_answered_requests_total", "reason"),
        ("prfaas_router_fallbacks_total", "prfaas_manager_fallbacks_total", "reason"),
    ]
    for routed, counted, label in pairs:
        wanted = sums([site.router_url], routed, label)
        await until(
            lambda: sums(site.manager_urls, counted, label) == wanted,  # noqa: B023 - evaluated within the loop
            seconds=30,
            what=f"{counted}: {wanted}",
        )


def _free(host: str) -> str:
    return f"{host}:{split_address(free_address())[1]}"


@contextlib.contextmanager
def running_replicated(directory: Path, **settings: Any) -> Iterator[ReplicatedDeployment]:
    """Yield a deployment on loopback. Its logs stay in `directory`."""
    with Children(directory) as children:
        stack = Stack(children, directory)
        site = ReplicatedDeployment(children, stack, directory)
        site.start(stack, **settings)
        yield site


@contextlib.contextmanager
def running_across(
    directory: Path, inside_far: Sequence[str], hosts: Mapping[str, str], **settings: Any
) -> Iterator[ReplicatedDeployment]:
    """Yield a deployment whose cluster "east" runs in another network namespace."""
    elsewhere = directory / "far"
    elsewhere.mkdir()
    with Children(directory) as children, Children(elsewhere, inside=inside_far) as far:
        stack = Stack(children, directory)
        shutil.copy(stack.secret_file, elsewhere)
        site = ReplicatedDeployment(children, stack, directory)
        site.start(stack, far=(far, Stack(far, elsewhere)), hosts=hosts, **settings)
        yield site
