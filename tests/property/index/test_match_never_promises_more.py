"""The index against a brute-force model that looks at every token of every node."""

from __future__ import annotations

import pytest

from tests.property.index.world import World, usable_by_brute_force

SHORT_HISTORIES = 150
SOAK_HISTORIES = 10_000


def run_history(seed: int) -> tuple[int, int]:
    """Play one history; returns (queries, queries whose answer was shorter than it could be)."""
    world = World(seed)
    queries = missed = 0
    for _ in range(world.random.randint(3, 14)):
        world.step()
        prompt = world.random.choice(world.prompts)
        chain = world.chain(prompt)
        answer = world.index.match(world.query(prompt, list(range(1, len(prompt) + 1))))
        usable = {match.node: match.usable_tokens for match in answer.nodes}
        for node in world.nodes:
            best = usable_by_brute_force([node], chain, len(prompt))
            promised = usable.get(node.name, 0)
            assert promised <= best, f"seed {seed}: {node.name} promises {promised}, holds {best}"
            queries += 1
            missed += promised < best
        for match in answer.clusters:
            members = [node for node in world.nodes if node.cluster == match.cluster]
            best = usable_by_brute_force(members, chain, len(prompt))
            promised = match.usable_tokens
            assert promised <= best, f"seed {seed}: {match.cluster} promises {promised}, holds {best}"
    for node in world.nodes:
        assert world.index.digests(node.name) == node.inventory.digests(), f"seed {seed}: digests of {node.name} differ"
    return queries, missed


def run_histories(count: int) -> None:
    results = [run_history(seed) for seed in range(count)]
    queries, missed = sum(r[0] for r in results), sum(r[1] for r in results)
    assert missed <= queries * 0.03, f"{missed} of {queries} answers are shorter than what is there"


@pytest.mark.timeout(120)
def test_no_answer_is_longer_than_what_is_there_and_digests_agree() -> None:
    run_histories(SHORT_HISTORIES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_histories() -> None:
    run_histories(SOAK_HISTORIES)
