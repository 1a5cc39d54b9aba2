"""Four real engines under each policy: the tokens are those of one engine, and what KV moves is what the policy says."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.four import FourEngines, four_engines
from tests.e2e.managed import prompt_of
from tests.support.waiting import wait_until
from tests.unit.scheduler.endpoint_picker.conformance import DATA

pytestmark = [pytest.mark.vllm]
POLICIES = ("prfaas", "ppd", "llm-d prefix decider", "always-disagg")
NEVER = 1 << 20  # a t that no prompt here exceeds
T = 256
LIMIT = 100  # of llm-d's decider
NUM_TURNS = 4
WORKERS = 4
_probes = itertools.count(5_000_000)
# What may be said of a request under each policy.
REASONS = {
    "prfaas": {"long", "short", "congested"},  # four engines on a small machine hold up the link's threads too
    "ppd": {"ppd_first_turn", "ppd_table_local"},
    "llm-d prefix decider": {"suffix_uncached", "suffix_cached"},
    "always-disagg": {"pd"},
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourEngines]:
    with four_engines(tmp_path_factory.mktemp("four")) as running:
        yield running


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
    """The decode node's own prefill of a later turn halves its TTFT at no cost."""
    cells = [
        (context, kind) for context in ("small", "large") for kind in ("tiny", "small_bal", "mid_bal", "mid_paste")
    ]
    entries = [
        {"context_class": context, "workload_type": kind, "qps": 1.0}
        | {"pd_ttft_ms": 100.0, "ppd_ttft_ms": 50.0, "pd_tpot_ms": 10.0, "ppd_tpot_ms": 10.0}
        for context, kind in cells
    ]
    return {"weights": {"w_ttft": 1.0, "w_tpot": 1.0}, "entries": entries}


@dataclass(frozen=True)
class Asked:
    """One answered request of a conversation; turn 0 is a prompt of its own."""

    turn: int
    route: str
    reason: str
    fallback: str
    transfer: str  # the id of what brought its KV; empty: nothing did
    is_right: bool


def _conversation(engines: FourEngines, seed: int, num_turns: int) -> list[Asked]:
    """Each turn is what was said before and something new; a single turn is a prompt of its own."""
    source = random.Random(seed)
    session = f"s{seed}" if num_turns > 1 else ""
    prompt: list[int] = []
    asked = []
    for turn in range(1, num_turns + 1):
        num_new = source.choice((60, 300, 500)) if turn == 1 else source.randrange(20, 60)
        prompt = [*prompt, *prompt_of(num_new, seed=seed * 10 + turn)]
        answer = engines.ask(prompt, session=session)
        its = answer.headers
        is_right = answer.token_ids == engines.reference(prompt)
        of_conversation = turn if num_turns > 1 else 0
        asked.append(
            Asked(
                of_conversation,
                its["x-prfaas-route"],
                its["x-prfaas-reason"],
                its.get("x-prfaas-fallback", ""),
                its.get("x-prfaas-transfer", ""),
                is_right,
            )
        )
        prompt = [*prompt, *answer.token_ids]
    return asked


def _run(
    engines: FourEngines, policy: str, directory: Path, *, num_conversations: int, num_single: int
) -> tuple[list[Asked], Mapping[str, int], str]:
    """The requests, the bytes of KV by transfer, and a line that sums them up."""
    engines.set_policy(**_settings(policy, directory))
    probing: set[str] = set()  # transfers, which may end at any time
    wait_until(lambda: _probe(engines, probing) in REASONS[policy], what="a router that knows the policy")
    before, known = engines.sent_bytes(), engines.sent_by_transfer().keys()
    base = 1000 * (1 + POLICIES.index(policy)) + 10_000 * num_conversations
    lengths = [NUM_TURNS] * num_conversations + [1] * num_single
    with ThreadPoolExecutor(WORKERS) as pool:
        running = [pool.submit(_conversation, engines, base + n, turns) for n, turns in enumerate(lengths)]
        asked = [its for conversation in running for its in conversation.result()]
    named = {its.transfer for its in asked if its.transfer}
    wait_until(lambda: named <= engines.sent_by_transfer().keys(), what="the ends of all transfers")
    moved = {name: count for name, count in engines.sent_by_transfer().items() if name not in known | probing}
    return asked, moved, _line(policy, asked, moved, engines.sent_bytes() - before)


def _probe(engines: FourEngines, transfers: set[str]) -> str:
    """Why a prompt below every limit went where it went; its transfer, if any, joins `transfers`."""
    its = engines.ask(prompt_of(20, seed=next(_probes))).headers
    transfers.add(its.get("x-prfaas-transfer", ""))
    return its["x-prfaas-reason"]


def _line(policy: str, asked: list[Asked], moved: Mapping[str, int], sent_bytes: int) -> str:
    shares = ", ".join(f"{reason} {count}" for reason, count in Counter(its.reason for its in asked).most_common())
    first, later = (
        sum(moved.get(its.transfer, 0) for its in asked if its.turn and (its.turn > 1) == is_later) / 1e6
        for is_later in (False, True)
    )
    size = f"{sent_bytes / 1e6:7.1f} MB of KV ({first:.1f} in first turns, {later:.1f} in later ones)"
    return f"{policy:22} {len(asked):4} requests  {size}  {shares}"


def _assert_as_the_policy_says(policy: str, asked: list[Asked], moved: Mapping[str, int]) -> None:
    """Every byte of KV is of a request that says so: what is local moves none."""
    local = [its for its in asked if its.route == "local"]
    assert [its for its in local if its.transfer] == []
    assert moved.keys() == {its.transfer for its in asked if its.transfer}
    assert [its for its in asked if not its.is_right] == []
    assert [its for its in asked if its.fallback] == []
    assert {its.reason for its in asked} <= REASONS[policy]
    remote = {"long", "ppd_first_turn", "suffix_uncached", "pd"}
    assert all((its.route == "remote") == (its.reason in remote) for its in asked)
    first = [its for its in asked if its.turn == 1]
    later = [its for its in asked if its.turn > 1]
    assert first and later
    if policy == "ppd":
        assert {its.reason for its in first} == {"ppd_first_turn"}
        assert any(its.reason == "ppd_table_local" for its in later)
        assert all(moved[its.transfer] > 0 for its in first)


@pytest.mark.soak  # four engines start for it; test_ppd and test_front_door have two
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.timeout(900)
def test_every_policy_answers_as_one_engine_does(engines: FourEngines, policy: str, tmp_path: Path) -> None:
    asked, moved, _ = _run(engines, policy, tmp_path, num_conversations=2, num_single=2)
    _assert_as_the_policy_says(policy, asked, moved)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.timeout(1800)
def test_two_hundred_requests_under_every_policy(
    engines: FourEngines, policy: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    asked, moved, line = _run(engines, policy, tmp_path, num_conversations=40, num_single=40)
    request.config.get_terminal_writer().line(f"\n{line}")
    _assert_as_the_policy_says(policy, asked, moved)
