"""Routing with an in-memory world: unknown layouts, request rates, turns."""

from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from prfaas.hashing import HASH_BYTES
from prfaas.manager.config import ManagerConfig
from prfaas.manager.routing.policy import MAX_RATES, RequestRates
from prfaas.manager.routing.router import _WARNING_SECONDS, RequestRouter
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.route import NO_LAYOUT
from prfaas.scheduler.snapshot import RequestFacts
from tests.support.timed_world import TimedWorld

MODEL = "test_routing"


class RoutedWorld(TimedWorld):
    """A manager's routing over two PD clusters of one node each."""

    def __init__(self) -> None:
        super().__init__(expiry_seconds=1e9)
        self._num_requests = 0
        for name in ("west", "east"):
            self.register(name, name, models=_MODELS)
        self.routing = RequestRouter(
            ManagerConfig(secret_file=Path("secret")),
            world=self.world,
            paths=self.paths,
            secret=bytes(32),
            clock=self.clock,
            wall_clock=self.clock,
        )

    def ask(self, *, model: str = MODEL, cluster: str = "", session: str = "", turn: int = 0) -> bytes:
        """Route one request; its id, under which the decision is remembered."""
        self._num_requests += 1
        request_id = self._num_requests.to_bytes(8, "big")
        asked = pb.RouteRequest(request_id=request_id, model=model, num_prompt_tokens=9, cluster=cluster)
        asked.session, asked.turn = session, turn
        self.routing.route(asked)
        return request_id

    def ask_again(self, request_id: bytes, *, session: str) -> None:
        """The same request, with a length that the first answer asked for."""
        stated = pb.StatedCheckpoint(num_tokens=4, hash=bytes(HASH_BYTES))
        asked = pb.RouteRequest(request_id=request_id, model=MODEL, num_prompt_tokens=9, checkpoints=[stated])
        asked.session = session
        self.routing.route(asked)

    def facts(self, request_id: bytes) -> RequestFacts:
        decided = self.routing.decisions.get(request_id)
        assert decided is not None
        return decided.facts


_MODELS = (MODEL, f"{MODEL}_other")


def _num_without_layout() -> float:
    return REGISTRY.get_sample_value("prfaas_manager_decisions_without_layout_total", {"model": MODEL}) or 0.0


def test_model_without_layout_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    site, before = RoutedWorld(), _num_without_layout()
    for site.now in (0.0, 1.0, _WARNING_SECONDS):
        decided = site.routing.decisions.get(site.ask())
        assert decided is not None and NO_LAYOUT in decided.document()["explanation"]
    assert _num_without_layout() == before + 3
    assert len([record for record in caplog.records if "layout.unknown" in record.getMessage()]) == 2


def test_request_rate_counts_ten_seconds_per_cluster_and_model() -> None:
    site = RoutedWorld()
    for site.now, cluster, model in ((0.0, "west", MODEL), (5.0, "west", MODEL), (5.0, "east", MODEL)):
        site.ask(cluster=cluster, model=model)

    def rate(cluster: str, model: str = MODEL) -> float:
        decided = site.routing.decisions.get(site.ask(cluster=cluster, model=model))
        assert decided is not None
        return decided.snapshot.requests_per_second

    assert (rate("west"), rate("east"), rate("west", _MODELS[1])) == (0.3, 0.2, 0.1)
    site.now = 10.0
    assert rate("west") == 0.3, "the one of ten seconds ago no longer counts"


def test_repeated_decision_counts_once() -> None:
    """A router asks again without the instance whose leg failed."""
    site = RoutedWorld()
    for excluded in ([], ["west/0"]):
        asked = pb.RouteRequest(request_id=b"the same", model=MODEL, num_prompt_tokens=9, excluded_instances=excluded)
        site.routing.route(asked)
    assert site.routing.traffic.num_requests == 1
    decided = site.routing.decisions.get(b"the same")
    assert decided is not None and decided.snapshot.requests_per_second == 0.1


def test_first_request_of_a_session_is_its_first_turn() -> None:
    site = RoutedWorld()
    first = site.ask(session="s")
    assert site.facts(first).turn == 1
    site.ask_again(first, session="s")
    assert (site.facts(first).turn, site.facts(first).session_agent) == (1, None), "of the same request"
    later = site.facts(site.ask(session="s"))
    assert later.turn == 0 and later.session_agent is not None
    assert site.facts(site.ask()).turn == 0, "nobody says of what it is a turn"
    assert site.facts(site.ask(session="chat", turn=3)).turn == 3, "its messages say so"
    site.now += 3601.0
    assert site.facts(site.ask(session="s")).turn == 1, "forgotten after an hour"


def test_only_the_latest_rates_are_kept() -> None:
    rates = RequestRates()
    for number in range(MAX_RATES + 1):
        rates.count(str(number), MODEL, 1.0)
        rates.count("busy", MODEL, 1.0)
    assert rates.per_second("0", MODEL, 1.0) == rates.per_second("1", MODEL, 1.0) == 0.0
    assert (rates.per_second("2", MODEL, 1.0), rates.per_second("busy", MODEL, 1.0)) == (0.1, (MAX_RATES + 1) / 10)
