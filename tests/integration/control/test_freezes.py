"""Each process is frozen under load, as a stalled machine or heavy swapping freezes it: no request waits for it for long."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from prfaas.index.store.redis_store import START_ID, Keys, RedisStore, writer_address
from prfaas.manager.record.cluster_writer import RELOAD
from prfaas.manager.record.embedded_redis import find_server
from prfaas.types import ClusterName, InstanceRole
from tests.integration.control.redundant_deployment import NODES, T
from tests.support.process_deployment import CLUSTERS, UNSHAPED, Outcome, ProcessDeployment, ask, client, fresh_prompt
from tests.support.waiting import until, wait_until
from tools.demo.client import get_text
from tools.free_ports import free_address
from tools.link import Relay
from tools.processes import Child, Children
from tools.stack import Stack

NUM_CLIENTS = 6
SHORT_SECONDS, LONG_SECONDS = 8.0, 45.0
MAX_ADDED_SECONDS = 5.0
ROLES = ("decode agent", "prefill agent", "decode engine", "prefill engine", "manager", "redis")


class ReplicatedDeployment(ProcessDeployment):
    """Two managers on one Redis, two nodes per cluster, and one router."""

    managers: list[Child]
    manager_grpcs: list[str]
    manager_urls: list[str]
    redis: Child
    redis_url: str

    def start(self, stack: Stack, relays: ExitStack) -> None:
        host, _, port = free_address().rpartition(":")
        command = [find_server(), "--port", port, "--bind", host, "--save", "", "--dir", str(self._directory)]
        self.redis = self.children.start("redis", command)
        self.redis_url = f"redis://{host}:{port}"
        settings = {"redis_url": self.redis_url, "threshold_tokens": T, "rebalance_bytes_per_second": "0Gbps"}
        started = [stack.start_manager(f"manager-{number}", **settings) for number in range(2)]
        for manager, _, url in started:
            stack.await_server(manager, url, path="/readyz")
        self.managers = [manager for manager, _, _ in started]
        addresses = self.manager_grpcs = [grpc for _, grpc, _ in started]
        self.manager_urls = [url for _, _, url in started]
        for name, cluster in NODES.items():
            wire = free_address()
            relay = relays.enter_context(Relay(wire, UNSHAPED))
            role: InstanceRole = "prefill" if CLUSTERS[cluster] == "prfaas" else "both"
            self.start_node(name, relay, cluster=cluster, role=role, wire=wire, managers=addresses)
        for instance, url in self.engine_urls.items():
            stack.await_server(self.engines[instance], url)
        router, self.router_urls["west"] = stack.start_router(
            {"managers": addresses, "cluster": "west", "probe_interval": "500ms"}
        )
        stack.await_server(router, self.router_urls["west"])
        wait_until(lambda: self._sees_all("west"), seconds=90.0, what="healthy engines")

    def writers(self) -> dict[str, str]:
        """Return the address of the manager that writes each cluster."""
        client: Any = redis.Redis.from_url(self.redis_url)
        keys = {cluster: Keys().lease(ClusterName(cluster)) for cluster in CLUSTERS}
        owners = {cluster: client.hget(key, "owner") for cluster, key in keys.items()}
        client.close()
        return {cluster: writer_address(owner.decode()) for cluster, owner in owners.items() if owner}

    def pid_of(self, role: str) -> int:
        child = {
            "decode agent": self.agents["w0"].child,
            "prefill agent": self.agents["e0"].child,
            "decode engine": self.engines["w0/0"],
            "prefill engine": self.engines["e0/0"],
            "manager": self.managers[0],
            "redis": self.redis,
        }[role]
        return child.process.pid


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ReplicatedDeployment]:
    with Children(tmp_path) as children, ExitStack() as relays:
        stack = Stack(children, tmp_path)
        made = ReplicatedDeployment(children, stack, tmp_path)
        made.start(stack, relays)
        yield made


class Load:
    """Clients that keep asking, and when each answer ended and how long it took."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.answers: list[tuple[float, float, Outcome]] = []
        self._lengths = itertools.cycle((T // 2, 2 * T, 3 * T))
        self._is_over = asyncio.Event()

    async def keep_asking(self) -> None:
        async with client() as session:
            while not self._is_over.is_set():
                started = time.monotonic()
                outcome = await ask(session, self._url, fresh_prompt(next(self._lengths)))
                self.answers.append((time.monotonic(), time.monotonic() - started, outcome))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        clients = [asyncio.create_task(self.keep_asking()) for _ in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            self._is_over.set()
            await asyncio.gather(*clients)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def freeze(site: ReplicatedDeployment, role: str, seconds: float) -> tuple[float, float, int]:
    """Freeze a process under load. Return the share of delayed requests, the worst added seconds, and the failures."""
    load = Load(site.router_url)
    async with load.running():
        await until(lambda: len(load.answers) >= 10 * NUM_CLIENTS, seconds=90, what="answers before the fault")
        usual = statistics.quantiles([took for _, took, _ in load.answers], n=20)[-1]
        with frozen(site.pid_of(role)):
            began = time.monotonic()
            await asyncio.sleep(seconds)
        thawed = len(load.answers)
        await until(lambda: len(load.answers) >= thawed + 10 * NUM_CLIENTS, seconds=90, what="answers after the fault")
    during = [(took, outcome) for ended, took, outcome in load.answers if ended > began]
    added = [max(0.0, took - usual) for took, _ in during]
    delayed = sum(seconds > 1.0 for seconds in added) / len(added)
    return delayed, max(added), sum(not outcome.is_whole for _, outcome in during)


async def epochs_of(redis_url: str, cluster: ClusterName) -> list[int]:
    """Return the lease epochs of a cluster's stream, after checking that each entry follows the one before it."""
    store = RedisStore(redis_url)
    entries = await store.tail(cluster, START_ID)
    await store.close()
    for before, entry in itertools.pairwise(entries):
        assert entry.before in (before.id, RELOAD), f"{entry.id} follows {entry.before}, not {before.id}"
    return [int(entry.id.partition("-")[0]) for entry in entries]


def _sums(urls: list[str], name: str, label: str) -> Counter[str]:
    """Return the sums of a counter over several pages by one label."""
    found = Counter[str]()
    for url in urls:
        for family in text_string_to_metric_families(get_text(f"{url}/metrics")):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels[label]] += int(sample.value)
    return +found


async def sums_agree(site: ReplicatedDeployment) -> None:
    """Wait until the managers together have counted what the router has counted."""
    pairs = [
        ("prfaas_router_requests_total", "prfaas_manager_answered_requests_total", "outcome"),
        ("prfaas_router_decisions_total", "prfaas_manager_answered_requests_total", "reason"),
        ("prfaas_router_fallbacks_total", "prfaas_manager_fallbacks_total", "reason"),
    ]
    for routed, counted, label in pairs:
        wanted = _sums([site.router_url], routed, label)
        await until(lambda: _sums(site.manager_urls, counted, label) == wanted, seconds=30, what=f"{counted}: {wanted}")  # noqa: B023 - evaluated within the loop


@pytest.mark.timeout(300)
async def test_no_request_waits_for_a_frozen_manager_which_writes_nothing_after_it_wakes(
    site: ReplicatedDeployment,
) -> None:
    assert site.writers() == {"east": site.manager_grpcs[0], "west": site.manager_grpcs[0]}
    _, worst, num_failed = await freeze(site, "manager", SHORT_SECONDS)
    assert num_failed == 0
    assert worst <= MAX_ADDED_SECONDS
    await sums_agree(site)
    assert site.writers() == {"east": site.manager_grpcs[1], "west": site.manager_grpcs[1]}
    for cluster in ("east", "west"):
        epochs = await epochs_of(site.redis_url, ClusterName(cluster))
        assert epochs == sorted(epochs) and len(set(epochs)) == 2


@pytest.mark.timeout(300)
async def test_no_request_waits_for_a_frozen_redis(site: ReplicatedDeployment) -> None:
    _, worst, num_failed = await freeze(site, "redis", SHORT_SECONDS)
    await sums_agree(site)
    assert num_failed == 0
    assert worst <= MAX_ADDED_SECONDS


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ROLES)
async def test_no_request_waits_45_seconds_for_a_frozen_process(
    site: ReplicatedDeployment, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    delayed, worst, num_failed = await freeze(site, role, LONG_SECONDS)
    await sums_agree(site)
    with capsys.disabled():
        sys.stdout.write(f"\n{role}: {delayed:.1%} delayed, worst {worst:.2f} s, {num_failed} failed\n")
    assert num_failed == 0
    assert worst <= MAX_ADDED_SECONDS
