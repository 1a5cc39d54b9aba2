"""Links that a manager probes, when, and with which grants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas import grants
from prfaas.index.membership import LinkFigures
from prfaas.manager.config import GRANT_SECONDS, ManagerConfig
from prfaas.manager.planning.link_probes import GRACE_SECONDS, PROBE_SECONDS, REPEAT_SECONDS, LinkProbes
from prfaas.types import AgentName, ClusterKind, CopyEnd, ProbeCommand
from tests.support.timed_world import TimedWorld

SECRET = b"s" * 32
CONFIG = ManagerConfig(secret_file=Path("-"), deployment=Path("-"), link_probe_bytes=5 << 20)
LINK = LinkFigures(AgentName("d1"), 0.0, 10e6, 0.05, 0.05, 0, 0.0, num_connections=4)
WALL_CLOCK = 1e9


class ProbedWorld(TimedWorld):
    """Two PrfaaS nodes and a PD node."""

    def __init__(self, config: ManagerConfig = CONFIG, *, writes: bool = True) -> None:
        super().__init__(expiry_seconds=1e6)
        self.num_requests = 0
        self.probes = LinkProbes(
            config,
            world=self.world,
            paths=self.paths,
            secret=SECRET,
            writes=lambda cluster: writes,
            num_requests=lambda: self.num_requests,
            clock=self.clock,
            wall_clock=lambda: WALL_CLOCK,
        )
        for name in ("p1", "p2"):
            self.register(name, "east", "prfaas", role="prefill", takes_probes=True)
        self.register("d1", "west", takes_probes=True)

    def step(self, seconds: float = 0.0) -> dict[str, list[ProbeCommand]]:
        """Return the commands of each node after `seconds`."""
        self.now += seconds
        self.paths.step()
        self.probes.step()
        names = sorted(member.node.name for member in self.world.live())
        return {name: commands for name in names if (commands := self.probes.commands_of(AgentName(name)))}

    def end(self, name: str, command: ProbeCommand) -> None:
        self.probes.report(AgentName(name), CopyEnd(command.transfer_id, "completed"))


@pytest.fixture
def site() -> ProbedWorld:
    return ProbedWorld()


def test_unknown_path_is_probed_once_and_later_from_another_node(site: ProbedWorld) -> None:
    (command,) = site.step()["p1"]
    assert site.step() == {"p1": [command]}, "until its agent has answered"
    site.end("p1", command)
    assert site.step(REPEAT_SECONDS - 1.0) == {}
    assert list(site.step(1.0)) == ["p2"]


def test_probe_repeats_only_after_another_request(site: ProbedWorld) -> None:
    site.num_requests = 7
    (command,) = site.step()["p1"]
    site.end("p1", command)
    assert site.step(1000.0) == {}
    site.num_requests += 1
    assert list(site.step()) == ["p2"]


def test_grant_of_a_probe_is_bounded_in_bytes_and_time(site: ProbedWorld) -> None:
    (command,) = site.step()["p1"]
    grant = grants.verify(command.grant, grants.derive_key(SECRET, "grant"), kind="probe", now=WALL_CLOCK)
    assert (grant.transfer_id, grant.source, grant.destination) == (command.transfer_id, "p1", "d1")
    assert (grant.destination_address, grant.num_tokens, grant.max_bytes) == ("d1:1", 0, 5 << 20)
    assert grant.expires_at == WALL_CLOCK + GRANT_SECONDS > WALL_CLOCK + PROBE_SECONDS


def test_recently_known_path_is_not_probed(site: ProbedWorld) -> None:
    site.report("p1", LINK)
    assert site.step() == {}
    site.report("p1", replace(LINK, capacity_bytes_per_second=0.0))
    assert site.step(REPEAT_SECONDS - 1.0) == {}
    assert list(site.step(1.0)) == ["p1"]


def test_busy_path_is_not_probed(site: ProbedWorld) -> None:
    site.report("p1", replace(LINK, capacity_bytes_per_second=0.0, bytes_per_second=1.0))
    assert site.step() == {}
    site.report("p1", replace(LINK, capacity_bytes_per_second=0.0, bytes_per_second=0.0))
    assert list(site.step(1.0)) == ["p1"]


def test_path_with_links_down_is_probed_from_another_node(site: ProbedWorld) -> None:
    (command,) = site.step()["p1"]
    site.end("p1", command)
    site.report("p1", replace(LINK, capacity_bytes_per_second=0.0, bytes_per_second=0.0, is_down=True))
    assert list(site.step(300.0)) == ["p2"]


def test_each_cluster_has_one_probe_at_a_time(site: ProbedWorld) -> None:
    site.register("d2", "north", "pd", takes_probes=True)
    site.register("p3", "south", "prfaas", takes_probes=True)
    begun = site.step()
    assert sorted(begun) == ["p1", "p3"], "to north from east, to west from south"
    for name, (command,) in begun.items():
        site.end(name, command)
    assert sum(map(len, site.step().values())) == 2, "the other two"


def test_unreported_probe_ends_at_its_deadline(site: ProbedWorld) -> None:
    site.step()
    assert site.step(PROBE_SECONDS + GRACE_SECONDS) == {}


def test_only_the_sending_node_ends_a_probe(site: ProbedWorld) -> None:
    (command,) = site.step()["p1"]
    site.end("d1", command)
    assert site.step() == {"p1": [command]}


@pytest.mark.parametrize("kinds", [("pd", "pd"), ("prfaas", "prfaas")])
def test_paths_outside_of_plans_are_not_probed(kinds: tuple[ClusterKind, ClusterKind]) -> None:
    site = ProbedWorld()
    for name in ("p1", "p2", "d1"):
        site.world.forget(AgentName(name))
    site.register("a", "east", kinds[0], takes_probes=True)
    site.register("b", "west", kinds[1], takes_probes=True)
    assert site.step() == {}


def test_agents_without_support_are_not_probed(site: ProbedWorld) -> None:
    site.register("d1", "west", "pd")
    assert site.step() == {}


def test_nothing_is_probed_if_disabled_or_written_elsewhere() -> None:
    assert ProbedWorld(replace(CONFIG, link_probe_bytes=0)).step() == {}
    assert ProbedWorld(writes=False).step() == {}
