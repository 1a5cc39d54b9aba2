"""Real engines under each routing policy: tokens equal those of one engine, and KV moves only as the policy says."""

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_deployment import Deployment, EngineOptions, Node, empty_deployment, random_prompt
from tests.support.engine_pair import EnginePair
from tests.support.waiting import wait_until
from tests.unit.scheduler.endpoint_picker.conformance import DATA
from tools.demo.client import Answer, get_json, prefilled_tokens
from tools.stack import engine_flags

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
FAMILY = "granite4h"
POLICIES = ("prfaas", "ppd", "llm-d prefix decider", "always-disagg")
NEVER = 1 << 20  # No prompt here exceeds this threshold.
T = 256
LIMIT = 100  # Of llm-d's decider.
NUM_TURNS, NUM_CONVERSATIONS = 4, 40
WORKERS = 4
_probes = itertools.count(5_000_000)
# Reasons that a policy may give.
REASONS = {
    # Four engines on a small machine delay the link's threads, which looks like congestion.
    "prfaas": {"long", "short", "congested"},
    "ppd": {"ppd_first_turn", "ppd_table_local"},
    "llm-d prefix decider": {"suffix_uncached", "suffix_cached"},
    "always-disagg": {"pd"},
}


FOUR_NODES = {
    "east": Node("east", "prfaas", "prefill"),
    "west-p": Node("west", "pd", "prefill"),
    "west-d0": Node("west", "pd", "decode"),
    "west-d1": Node("west", "pd", "decode"),
}
PD_PAIR = {"east": Node("west", "pd", "prefill"), "west": Node()}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Yield four engines: one prefills in a PrfaaS cluster, one in the PD cluster, and two decode."""
    with empty_deployment(tmp_path_factory.mktemp("four"), FAMILY) as deployment:
        deployment.configure(FOUR_NODES)
        roles = {name: "kv_producer" if node.role == "prefill" else "kv_both" for name, node in FOUR_NODES.items()}
        options = engine_flags(chunk_tokens=256)
        deployment.start_engines({name: EngineOptions(options, kv_role=role) for name, role in roles.items()})
        yield deployment


def _settings(policy: str, directory: Path) -> dict[str, Any]:
    match policy:
        case "prfaas":
            return {"threshold_tokens": T}
        case "ppd":
            (directory / "table.json").write_text(json.dumps(_table()))
            table = str(directory / "table.json")
            return {"threshold_tokens": NEVER, "local_policy": "ppd", "ppd_table": table}
        case "always-disagg":
            return {"threshold_tokens": NEVER, "local_policy": "pd"}
        case _:
            minimal = (DATA / "llmd-minimal.yaml").read_text()
            (directory / "picker.yaml").write_text(minimal.replace("nonCachedTokens: 8", f"nonCachedTokens: {LIMIT}"))
            picking = {"local_policy": "endpoint_picker", "endpoint_picker": str(directory / "picker.yaml")}
            return {"threshold_tokens": NEVER, **picking}


def _table() -> dict[str, Any]:
    """Return a table in which the decode node's own prefill of a later turn halves the TTFT at no cost."""
    kinds = ("tiny", "small_bal", "mid_bal", "mid_paste")
    return _table_of(dict.fromkeys(kinds, 50.0))


def _table_of(local_ms: Mapping[str, float]) -> dict[str, Any]:
    """Return a PPD table with the TTFT of a local prefill by workload. A remote prefill takes 100 ms."""
    fixed = {"qps": 1.0, "pd_ttft_ms": 100.0, "pd_tpot_ms": 10.0, "ppd_tpot_ms": 10.0}
    entries = [
        {"context_class": context, "workload_type": workload, "ppd_ttft_ms": ttft_ms, **fixed}
        for context in ("small", "large")
        for workload, ttft_ms in local_ms.items()
    ]
    return {"weights": {"w_ttft": 1.0, "w_tpot": 1.0}, "entries": entries}


@dataclass(frozen=True)
class Exchange:
    """Answered request of a conversation; turn 0 is a single prompt. `transfer` is the id of the transfer of its KV."""

    turn: int
    route: str
    reason: str
    fallback: str
    transfer: str
    is_right: bool


def _conversation(engines: Deployment, seed: int, num_turns: int) -> list[Exchange]:
    """Ask several turns, each the former turn and something new, or one single prompt."""
    source = random.Random(seed)
    headers = {"x-session-id": f"s{seed}"} if num_turns > 1 else {}
    prompt: list[int] = []
    exchanges = []
    for turn in range(1, num_turns + 1):
        num_new = source.choice((60, 300, 500)) if turn == 1 else source.randrange(20, 60)
        prompt = [*prompt, *random_prompt(num_new, seed=seed * 10 + turn)]
        answer = engines.ask(engines.router_url, prompt, headers=headers)
        exchanges.append(
            Exchange(
                turn if num_turns > 1 else 0,
                answer.headers["x-prfaas-route"],
                answer.headers["x-prfaas-reason"],
                answer.headers.get("x-prfaas-fallback", ""),
                answer.headers.get("x-prfaas-transfer", ""),
                answer.token_ids == engines.reference(prompt),
            )
        )
        prompt = [*prompt, *answer.token_ids]
    return exchanges


def _sent_by_transfer(engines: Deployment) -> dict[str, int]:
    """Return the acknowledged bytes of the latest 1,024 completed transfers of each agent."""
    records = (record for agent in engines.agents.values() for record in get_json(f"{agent.status_url}/transfers"))
    completed = (record for record in records if (record["direction"], record["outcome"]) == ("out", "completed"))
    return {record["transfer_id"]: record["acknowledged_bytes"] for record in completed}


def _run(engines: Deployment, policy: str, directory: Path) -> tuple[list[Exchange], Mapping[str, int]]:
    """Return the exchanges of conversations and single prompts, and the bytes of KV by transfer."""
    engines.configure(FOUR_NODES, manager=_settings(policy, directory), silence_seconds="3s")
    wait_until(lambda: engines.loads() == {f"{name}/0" for name in FOUR_NODES}, seconds=150.0, what="all loads")
    probing: set[str] = set()  # Transfers of probes, which may end at any time.
    wait_until(lambda: _probe(engines, probing) in REASONS[policy], what="a router that knows the policy")
    known = _sent_by_transfer(engines).keys()
    base = 1000 * (1 + POLICIES.index(policy))
    lengths = [NUM_TURNS] * NUM_CONVERSATIONS + [1] * NUM_CONVERSATIONS
    with ThreadPoolExecutor(WORKERS) as pool:
        running = [pool.submit(_conversation, engines, base + n, turns) for n, turns in enumerate(lengths)]
        exchanges = [exchange for conversation in running for exchange in conversation.result()]
    named = {exchange.transfer for exchange in exchanges if exchange.transfer}
    wait_until(lambda: named <= _sent_by_transfer(engines).keys(), what="the ends of all transfers")
    moved = {name: count for name, count in _sent_by_transfer(engines).items() if name not in known | probing}
    return exchanges, moved


def _probe(engines: Deployment, transfers: set[str]) -> str:
    """Return the reason for the route of a short prompt. Its transfer, if any, joins `transfers`."""
    headers = engines.ask(engines.router_url, random_prompt(20, seed=next(_probes))).headers
    transfers.add(headers.get("x-prfaas-transfer", ""))
    return headers["x-prfaas-reason"]


def _assert_as_the_policy_says(policy: str, exchanges: list[Exchange], moved: Mapping[str, int]) -> None:
    """Check that every byte of KV belongs to a request with a transfer. Local requests have none."""
    local = [exchange for exchange in exchanges if exchange.route == "local"]
    assert [exchange for exchange in local if exchange.transfer] == []
    assert moved.keys() == {exchange.transfer for exchange in exchanges if exchange.transfer}
    assert [exchange for exchange in exchanges if not exchange.is_right] == []
    assert [exchange for exchange in exchanges if exchange.fallback] == []
    assert {exchange.reason for exchange in exchanges} <= REASONS[policy]
    remote = {"long", "ppd_first_turn", "suffix_uncached", "pd"}
    assert all((exchange.route == "remote") == (exchange.reason in remote) for exchange in exchanges)
    first = [exchange for exchange in exchanges if exchange.turn == 1]
    later = [exchange for exchange in exchanges if exchange.turn > 1]
    assert first and later
    if policy == "ppd":
        assert {exchange.reason for exchange in first} == {"ppd_first_turn"}
        assert any(exchange.reason == "ppd_table_local" for exchange in later)
        assert all(moved[exchange.transfer] > 0 for exchange in first)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_like_one_engine(engines: Deployment, policy: str, tmp_path: Path) -> None:
    exchanges, moved = _run(engines, policy, tmp_path)
    _assert_as_the_policy_says(policy, exchanges, moved)


@pytest.fixture(scope="module")
def ppd_pair(pair: EnginePair, tmp_path_factory: pytest.TempPathFactory) -> EnginePair:
    """Configure a pair so that small turns are prefilled where their KV is, and huge ones at the prefill node."""
    table = tmp_path_factory.mktemp("ppd") / "table.json"
    table.write_text(json.dumps(_table_of({"small_bal": 50.0, "mid_paste": 50.0, "huge_paste": 200.0})))
    manager = {"threshold_tokens": T, "local_policy": "ppd", "ppd_table": str(table)}
    pair.configure(PD_PAIR, manager=manager, silence_seconds="3s")
    return pair


@pytest.mark.parametrize("pair", [FAMILY], indirect=True)
def test_ppd_moves_kv_in_the_first_turn_and_where_the_table_says_so(ppd_pair: EnginePair) -> None:
    turns = [
        (400, "ppd_first_turn", 1),
        (20, "ppd_table_local", 1),
        (100, "ppd_table_local", 1),
        (600, "ppd_table_pd", 2),
    ]
    prompt: list[int] = []
    for number, (num_new, reason, num_arrived) in enumerate(turns):
        prompt = [*prompt, *random_prompt(num_new, seed=number)]
        computed = prefilled_tokens(ppd_pair.prefill.url)
        answer = _ask_and_await_index(ppd_pair, prompt)
        assert answer.headers["x-prfaas-reason"] == reason
        outcomes = [transfer["outcome"] for transfer in ppd_pair.inbound_transfers("west")]
        assert outcomes.count("completed") == num_arrived
        if reason == "ppd_table_local":
            assert prefilled_tokens(ppd_pair.prefill.url) == computed
        else:
            wait_until(lambda: prefilled_tokens(ppd_pair.prefill.url) > computed, what="a prefill")  # noqa: B023
        assert answer.token_ids == ppd_pair.reference(prompt)
        prompt = [*prompt, *answer.token_ids]


def _ask_and_await_index(pair: EnginePair, prompt: list[int]) -> Answer:
    """Return the answer once the manager knows the blocks that it leaves at the decode node."""
    before = pair.num_reports("west")
    answer = pair.ask(pair.router_url, prompt)
    wait_until(lambda: pair.num_reports("west") > before, what="the blocks")
    wait_until(pair.has_healed, what="an index that knows the blocks")
    return answer
