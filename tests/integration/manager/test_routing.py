"""Route over gRPC: the decision, its reason and its grant, alike at every manager."""

import time
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from prfaas import grants, metrics
from prfaas.errors import IndexRefusal
from prfaas.hashing import HashChain
from prfaas.index.membership import Figures, LinkFigures
from prfaas.manager.daemon import Manager
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.types import AgentName
from tests.support.deployment import MODEL, SECRET, Deployment, chain_of, hybrid_layout, stored
from tests.support.waiting import until

LAYOUT = hybrid_layout()
LINK = LinkFigures(AgentName("decode"), 0.0, 0.0, 0.08, 0.08, 0, 0.0, num_connections=8)


def route_request(chain: HashChain, **fields: object) -> pb.RouteRequest:
    request = pb.RouteRequest(
        model=MODEL,
        units=b"".join(chain.units),
        num_prompt_tokens=chain.num_tokens,
        prompt_hash=chain.at(chain.num_tokens - 1),
        tenant="acme",
    )
    request.MergeFrom(pb.RouteRequest(**fields))  # type: ignore[arg-type]
    return request


async def two_clusters(deployment: Deployment, manager: Manager, *, figures: Figures | None = None) -> ManagerClient:
    """A PrfaaS node "prefill" and a PD node "decode", both known to the manager."""
    await deployment.node("prefill", manager, cluster="prfaas", kind="prfaas", role="prefill", figures=figures)
    deployment.reporters["decode"] = await deployment.node("decode", manager, cluster="pd")
    return deployment.client(manager)


async def test_long_prompt_goes_remote_with_a_valid_grant(deployment: Deployment) -> None:
    client = await two_clusters(deployment, await deployment.start_manager(threshold_tokens=500))
    chain = chain_of(1000)
    response = await client.route(route_request(chain))
    assert (response.route, response.reason) == ("remote", "long")
    assert (response.prefill.node, response.decode.node) == ("prefill", "decode")
    assert (response.uncached_tokens, response.missing_tokens) == (1000, 999)
    grant = grants.verify(response.grant, grants.derive_key(SECRET, "grant"), kind="transfer", now=time.time())
    assert grant.transfer_id == response.transfer_id
    assert (grant.source, grant.destination, grant.destination_address) == ("prefill", "decode", "decode:7400")
    assert (grant.prompt_hash, grant.num_tokens, grant.tenant) == (chain.at(999), 999, "acme")


async def test_request_overflows_to_the_pd_cluster_that_has_its_kv(deployment: Deployment) -> None:
    manager, chain = await deployment.start_manager(), chain_of(20_000)
    client = await two_clusters(deployment, manager)
    away = await deployment.node("away", manager, cluster="north")
    away.publish(stored(LAYOUT, chain, 19_200))
    await until(lambda: away.status.acknowledged >= 1)
    for fields, expected in (({"overflow": True}, "away"), ({}, "decode")):
        response = await client.route(route_request(chain, cluster="pd", **fields))
        assert response.decode.node == expected
    response = await client.route(route_request(chain_of(20_000, seed=1), cluster="pd", overflow=True))
    assert response.decode.node == "decode"


async def test_prompt_with_a_local_prefix_stays(deployment: Deployment) -> None:
    client = await two_clusters(deployment, await deployment.start_manager(threshold_tokens=500))
    reporter = deployment.reporters["decode"]
    reporter.publish(stored(LAYOUT, chain_of(1000), 640))
    await until(lambda: reporter.status.acknowledged >= 1)
    response = await client.route(route_request(chain_of(1000)))
    assert (response.route, response.reason) == ("local", "short")
    assert (response.cached_tokens, response.uncached_tokens) == (640, 360)
    assert not response.grant


async def test_blocks_without_state_save_transfer_but_not_compute(deployment: Deployment) -> None:
    client = await two_clusters(deployment, await deployment.start_manager(threshold_tokens=500))
    reporter = deployment.reporters["decode"]
    reporter.publish(stored(LAYOUT, chain_of(1000), 640, state=False))
    await until(lambda: reporter.status.acknowledged >= 1)
    response = await client.route(route_request(chain_of(1000)))
    assert response.route == "remote", "without a state nothing of it can be used"
    assert (response.uncached_tokens, response.missing_tokens) == (1000, 999 - 640)


def _num_decisions() -> float:
    return sum(
        sample.value
        for metric in metrics.MANAGER_DECISIONS.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )


async def test_repeated_turn_is_one_decision(deployment: Deployment) -> None:
    client = await two_clusters(deployment, await deployment.start_manager(threshold_tokens=500))
    reporter = deployment.reporters["decode"]
    chain = chain_of(1000)
    reporter.publish(stored(LAYOUT, chain, 645))
    await until(lambda: reporter.status.acknowledged >= 1)
    before = _num_decisions()
    first = await client.route(route_request(chain))
    assert list(first.odd_lengths) == [645]
    assert _num_decisions() == before
    stated = [pb.StatedCheckpoint(num_tokens=645, hash=chain.at(645))]
    await client.route(route_request(chain, checkpoints=stated))
    assert _num_decisions() == before + 1
    await client.route(route_request(chain_of(1000, seed=1)))
    assert _num_decisions() == before + 2, "without a state of odd length one question is all"


@pytest.mark.parametrize(("is_down", "reason"), [(True, "link_down"), (False, "long")])
async def test_link_that_is_down_is_not_used(deployment: Deployment, is_down: bool, reason: str) -> None:
    manager = await deployment.start_manager(threshold_tokens=500)
    figures = Figures(links=(replace(LINK, num_connections=0, is_down=is_down),))
    client = await two_clusters(deployment, manager, figures=figures)
    await until(lambda: any(path.pressures for path in manager.paths.views()), what="the link's figures")
    assert (await client.route(route_request(chain_of(1000)))).reason == reason


async def test_unknown_model_is_refused(deployment: Deployment) -> None:
    client = await two_clusters(deployment, await deployment.start_manager(threshold_tokens=500))
    before = _num_unknown_models()
    with pytest.raises(IndexRefusal) as unknown:
        await client.route(route_request(chain_of(1000), model="unheard-of"))
    assert (unknown.value.reason, _num_unknown_models()) == ("unknown_model", before + 1)
    with pytest.raises(IndexRefusal) as nobody:
        await client.route(route_request(chain_of(1000), excluded_instances=["decode-engine"]))
    assert nobody.value.reason == "no_route"


def _num_unknown_models() -> float:
    labels = {"call": "Route", "reason": "unknown_model"}
    return REGISTRY.get_sample_value("prfaas_manager_refusals_total", labels) or 0.0


async def test_session_returns_to_its_node(deployment: Deployment) -> None:
    manager = await deployment.start_manager(threshold_tokens=5000)
    client = await two_clusters(deployment, manager)
    await deployment.node("another", manager, cluster="pd")
    first = await client.route(route_request(chain_of(100), session="s", excluded_instances=["another-engine"]))
    assert first.decode.node == "decode"
    second = await client.route(route_request(chain_of(200), session="s"))
    assert second.decode.node == "decode", "by name and load it would have been another"
    assert (await client.route(route_request(chain_of(200)))).decode.node == "another"


async def test_two_managers_decide_alike(deployment: Deployment) -> None:
    await deployment.start_redis()
    first = await deployment.start_manager(threshold_tokens=500)
    second = await deployment.start_manager(threshold_tokens=500)
    client = await two_clusters(deployment, first)
    reporter = deployment.reporters["decode"]
    reporter.publish(stored(LAYOUT, chain_of(1000), 320))
    await until(lambda: len(second.world.live()) == 2, what="the nodes at the second manager")
    await until(lambda: second.world.index.num_blocks() == 21, what="the blocks at the second manager")
    for num_tokens in (100, 700, 820, 821, 1000):
        answers = [
            await asked.route(route_request(chain_of(num_tokens))) for asked in (client, deployment.client(second))
        ]
        for answer in answers:
            answer.ClearField("transfer_id")
            answer.ClearField("grant")
            answer.ClearField("version")
        assert answers[0] == answers[1], num_tokens
