"""The index against a brute-force model that looks at every token of every node."""

import sys

import pytest

from prfaas.index.query import MatchResult
from tests.support.index_world import FAMILIES, World, usable_by_brute_force

SHORT_HISTORIES = 80
SOAK_HISTORIES = 10_000


def run_history(seed: int) -> tuple[int, int]:
    """Play one history; returns (queries, queries whose answer was shorter than it could be)."""
    world = World(seed)
    has_states = any(group.is_state for layout in FAMILIES[world.family] for group in layout.groups)
    queries = missed = 0
    for _ in range(world.random.randint(3, 14)):
        world.step()
        prompt = world.random.choice(world.prompts)
        for answer in (world.ask(prompt, list(range(1, len(prompt) + 1))), world.ask_as_routers_do(prompt)):
            asked, short = check(world, prompt, answer, seed)
            queries, missed = queries + asked, missed + short
            assert has_states or not short, f"seed {seed}: an answer of {world.family} is shorter than what is there"
    for node in world.nodes:
        assert world.index.digests(node.name) == node.inventory.digests(), f"seed {seed}: digests of {node.name} differ"
    return queries, missed


def check(world: World, prompt: list[int], answer: MatchResult, seed: int) -> tuple[int, int]:
    """Compare the match of every node with what it holds: (answers about a node, those that are too short)."""
    chain, missed = world.chain(prompt), 0
    usable = {match.node: match.usable_tokens for match in answer.nodes}
    for node in world.nodes:
        best = usable_by_brute_force(node, chain, len(prompt))
        promised = usable.get(node.name, 0)
        assert promised <= best, f"seed {seed}: {node.name} promises {promised}, holds {best}"
        missed += promised < best
    return len(world.nodes), missed


def run_histories(count: int) -> str:
    """Return a summary of the queries and misses."""
    results = [run_history(seed) for seed in range(count)]
    queries, missed = sum(r[0] for r in results), sum(r[1] for r in results)
    assert missed <= queries * 0.03, f"{missed} of {queries} answers are shorter than what is there"
    return f"{queries} queries, none answered with more than is there, {missed} false misses"


@pytest.mark.timeout(120)
def test_no_match_exceeds_the_held_blocks() -> None:
    run_histories(SHORT_HISTORIES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_histories(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_histories(SOAK_HISTORIES)
    with capsys.disabled():
        sys.stdout.write(f"{summary}\n")
