"""Prefix caches of the twin: the pool's own rules, and a view of them that may lag behind."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.prefix_cache import CacheRules, NodeCaches, PrefixCache, block_name
from prfaas.sim.model.request import SimulatedRequest
from prfaas.types import AgentName, BlockHash

A, B = AgentName("a"), AgentName("b")


def chain(*numbers: int) -> list[BlockHash]:
    return [block_name(number) for number in numbers]


def request(blocks: Sequence[BlockHash]) -> SimulatedRequest:
    return SimulatedRequest(0, 0.0, num_prompt_tokens=16 * len(blocks) + 8, num_output_tokens=1, blocks=blocks)


@contextmanager
def two_caches(rules: CacheRules, max_blocks: int = 100) -> Iterator[tuple[Timeline, NodeCaches]]:
    timeline = Timeline()
    with closing(NodeCaches(timeline, rules, {A: max_blocks, B: max_blocks})) as caches:
        yield timeline, caches


def test_start_of_a_chain_is_evicted_last() -> None:
    with closing(PrefixCache(16, 4)) as cache:
        cache.keep(chain(1, 2, 3))
        cache.keep(chain(7, 8))
        assert cache.match(chain(1, 2, 3)) == 32
        assert cache.match(chain(7, 8)) == 32
        assert cache.match(chain(9, 1)) == 0


def test_reused_blocks_are_evicted_later() -> None:
    with closing(PrefixCache(16, 4)) as cache:
        for blocks in (chain(1, 2), chain(3, 4), chain(1, 2), chain(5, 6)):
            cache.keep(blocks)
        assert cache.match(chain(1, 2)) == 32
        assert cache.match(chain(3, 4)) == 0


def test_a_prompt_longer_than_the_cache_fills_it() -> None:
    with closing(PrefixCache(16, 3)) as cache:
        cache.keep(chain(1, 2, 3, 4, 5))
        assert cache.match(chain(1, 2, 3, 4, 5)) == 48


# Chains that share starts, as prompts do: every prefix of (c, c·10, c·10 + 1, ...) is a chain of conversation c.
prompts = st.tuples(st.integers(1, 6), st.integers(1, 9)).map(
    lambda pair: chain(*(pair[0] * 100 + i for i in range(pair[1])))
)


@given(st.lists(st.tuples(st.sampled_from([A, B]), prompts), max_size=30), st.integers(1, 12))
def test_cache_view_matches_the_caches(kept: list[tuple[AgentName, list[BlockHash]]], max_blocks: int) -> None:
    with two_caches(CacheRules(), max_blocks) as (_, caches):
        for agent, blocks in kept:
            caches.keep(agent, blocks)
        for _, blocks in kept:
            asked = request(blocks)
            known = caches.known(asked)
            assert [known.get(agent, 0) for agent in (A, B)] == [caches.usable(asked, agent) for agent in (A, B)]


def test_late_announcement_delays_the_view() -> None:
    with two_caches(CacheRules(announce_seconds=5.0)) as (timeline, caches):
        caches.keep(A, chain(1, 2))
        assert caches.known(request(chain(1, 2))) == {}
        assert caches.usable(request(chain(1, 2)), A) == 32
        timeline.run()
        assert timeline.now == pytest.approx(5.0)
        assert caches.known(request(chain(1, 2))) == {A: 32}


def test_the_last_token_is_always_computed() -> None:
    with two_caches(CacheRules()) as (_, caches):
        caches.keep(A, chain(1, 2))
        asked = SimulatedRequest(0, 0.0, num_prompt_tokens=32, num_output_tokens=1, blocks=chain(1, 2))
        assert caches.usable(asked, A) == 31
