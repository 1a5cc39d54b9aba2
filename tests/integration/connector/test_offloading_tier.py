"""The tier below vLLM's OffloadingConnector, under vLLM's own tiering manager and with real agents.

The facts are those of vLLM 0.32's tests of its tiers, and that no engine gets a chunk that it would have written otherwise.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from prfaas.errors import AgentUnreachable, ConfigError
from tests.support.agents import Agents, RunningAgent, on_thread
from tests.support.paused_process import paused
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm
CHUNK_TOKENS, CHUNK_BYTES, NUM_CHUNKS = 32, 10_000, 16
GROUPS = (OffloadingGroupConfig(16, ("a0", "a1"), 0), OffloadingGroupConfig(16, ("w0",), 1))
PARALLEL = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
CONFIG = OffloadingConfig(
    groups=GROUPS,
    worker_kv_bytes_per_block=CHUNK_BYTES // 2,
    enable_kv_cache_events=False,
    extra_config={},
    engine_id="",
    model=OffloadingModelConfig("tiny", "bfloat16"),
    cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2),
    parallel=PARALLEL,
    kv_cache_layout="HND",
)
_numbers = itertools.count()


class OffloadingEngine:
    """vLLM's tiering manager over a primary tier of a few chunks, as an OffloadingConnector drives it."""

    def __init__(self, agent: RunningAgent, config: OffloadingConfig = CONFIG, **settings: Any) -> None:
        tier = {"type": "PrfaasTier", "module_path": "prfaas.connector.vllm.tier", "agent_socket": str(agent.socket)}
        extra = {"cpu_bytes_to_use": NUM_CHUNKS * 12_288, "secondary_tiers": [tier | settings]}
        self.name = f"test-tier-{next(_numbers)}"
        self.spec = TieringOffloadingSpec(replace(config, extra_config=extra, engine_id=self.name))
        self.manager = self.spec.get_manager()
        self.rows = self.manager.primary_tier.get_kv_memoryview()

    def request(self, keys: Sequence[OffloadKey] = ()) -> ReqContext:
        """Return a new request, whose chunks lie one after the other."""
        context = ReqContext(f"r{next(_numbers)}")
        for number, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, number * CHUNK_TOKENS)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def store(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> None:
        """Write chunks into the primary tier, and wait until the tier has taken them."""
        context = context or self.request(keys)
        prepared = self.manager.prepare_store(keys, context)
        for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            np.asarray(self.rows)[chunk, :] = _content(key)
        self.manager.complete_store(prepared.keys_to_store, context)
        self.settle()

    def settle(self) -> None:
        wait_until(lambda: self.step() or not self.manager.has_pending_work(), what="the end of all jobs")  # type: ignore[func-returns-value]

    def load(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> int:
        """Look chunks up until all are in the primary tier or absent; return how many leading ones came, all right."""
        context, found = context or self.request(keys), list[Any]()

        def is_decided() -> bool:
            found[:] = [self.manager.lookup(key, context) for key in keys]
            self.step()
            return {*found} <= {LookupResult.HIT, LookupResult.MISS}

        wait_until(is_decided, what="verdicts on all chunks")
        num_hits = next((i for i, result in enumerate(found) if result is not LookupResult.HIT), len(found))
        loaded = self.manager.prepare_load(keys[:num_hits], context)
        for key, chunk in zip(keys, loaded.chunk_ids, strict=False):
            assert (np.asarray(self.rows)[chunk] == _content(key)).all(), key
        self.manager.complete_load(keys[:num_hits], context)
        return int(num_hits)

    def evict(self) -> None:
        """Empty the primary tier, as other requests would."""
        self.manager.primary_tier.reset_cache()

    def close(self) -> None:
        self.rows.release()
        self.manager.shutdown()


def _content(key: OffloadKey) -> int:
    return int(sum(key) % 120 + 1)


def _keys(seed: int, count: int = 4, *, group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(bytes([seed, number]) * 16, group) for number in range(count)]


Start = Callable[..., OffloadingEngine]


@pytest.fixture
def agents(tmp_path: Any) -> Iterator[Agents]:
    made = Agents(tmp_path, launch=on_thread)
    yield made
    made.stop()


@pytest.fixture
def start() -> Iterator[Start]:
    """Start engines that end with the test."""
    engines: list[OffloadingEngine] = []

    def start(*arguments: Any, **settings: Any) -> OffloadingEngine:
        engines.append(OffloadingEngine(*arguments, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_chunks_outlive_the_engine_and_reach_other_engines(agents: Agents, start: Start) -> None:
    agent = agents.start("west")
    first = OffloadingEngine(agent)
    keys = _keys(1)
    assert first.load(keys) == 0
    first.store(keys)
    first.store(_keys(1, group=1))
    first.close()
    second, third = start(agent), start(agent)
    assert [second.load(keys), third.load(keys), third.load(_keys(1, group=1))] == [4, 4, 4]
    assert third.load([*keys[:2], *_keys(2)]) == 2


def test_nothing_is_left_at_the_agent_after_stores_and_loads(agents: Agents, start: Start) -> None:
    agent = agents.start("west")
    engine = start(agent)
    for seed in range(3):
        engine.store(_keys(seed))
        engine.evict()
        engine.store(_keys(seed, 3))  # The agent holds it.
        engine.evict()
    assert engine.load(_keys(1)) == 4
    wait_until(lambda: not agent.status_page()["prefix_store"], what="the end of all uses")
    assert (agent.pool()["prefix"], agent.pool()["transfer"]) == (12, 0)


def test_a_drain_ends_every_job(agents: Agents, start: Start) -> None:
    engine = start(agents.start("west"))
    tier = engine.manager.secondary_tiers[0]
    jobs = [(1, _keys(1), False), (2, _keys(2), True), (3, [], False)]
    for number, keys, is_load in jobs:
        job = TransferJob(number, keys, np.arange(len(keys)), is_load, engine.request(keys))
        (tier.submit_load if is_load else tier.submit_store)(job)
    tier.drain_jobs()
    results = {result.job_id: result.success for result in tier.get_finished_jobs()}
    assert results == {1: True, 2: False, 3: True}


def test_a_later_chunk_of_a_prompt_leaves_the_pool_first(agents: Agents, start: Start) -> None:
    agent = agents.start("west", **{"pool-bytes": str(20 * 12_288), "transfer-ratio": "0.5"})
    engine = start(agent)
    keys, context = _keys(1, 8), engine.request(_keys(1, 8))
    for part in (keys[:3], keys[3:5], keys[5:]):
        engine.store(part, context)
    engine.evict()
    engine.store(_keys(2))
    engine.evict()
    assert engine.load(_keys(2)) == 4
    engine.evict()
    assert engine.load(keys) == 6


def _other_configs() -> dict[str, OffloadingConfig]:
    return {
        "model": replace(CONFIG, model=OffloadingModelConfig("other", "bfloat16")),
        "dtype": replace(CONFIG, model=OffloadingModelConfig("tiny", "fp8")),
        "layers": replace(CONFIG, groups=(replace(GROUPS[0], layer_names=("a0",)), GROUPS[1])),
        "block size": replace(CONFIG, groups=(replace(GROUPS[0], tokens_per_block=32), GROUPS[1])),
        "chunk size": replace(CONFIG, worker_kv_bytes_per_block=CHUNK_BYTES // 4, cache=OffloadingCacheConfig(16, 4)),
        "block bytes": replace(CONFIG, worker_kv_bytes_per_block=CHUNK_BYTES // 2 + 8),
        "tensor parallelism": replace(
            CONFIG, worker_kv_bytes_per_block=CHUNK_BYTES // 4, parallel=replace(PARALLEL, world_size=2, tp_size=2)
        ),
        "layout": replace(CONFIG, kv_cache_layout="NHD"),
        "canonical": replace(CONFIG, canonical_layout=True),
    }


@pytest.mark.parametrize("difference", _other_configs())
def test_engines_with_unlike_bytes_share_nothing(agents: Agents, start: Start, difference: str) -> None:
    agent = agents.start("west")
    start(agent).store(_keys(1))
    assert start(agent, _other_configs()[difference]).load(_keys(1)) == 0
    assert start(agent, replace(CONFIG, parallel=replace(PARALLEL, data_parallel_index=1))).load(_keys(1)) == 4


def test_an_operator_can_name_the_weights(agents: Agents, start: Start) -> None:
    agent = agents.start("west")
    start(agent, model="v1").store(_keys(1))
    moved = replace(CONFIG, model=OffloadingModelConfig("/elsewhere/tiny", "bfloat16"))
    assert [start(agent, moved, model=name).load(_keys(1)) for name in ("v1", "v2")] == [4, 0]


def test_a_reset_makes_the_pool_forget(agents: Agents, start: Start) -> None:
    agent = agents.start("west")
    engine = start(agent)
    engine.store(_keys(1))
    engine.manager.reset_cache()
    assert engine.load(_keys(1)) == 0
    wait_until(lambda: agent.pool()["prefix"] == 0, what="the forgotten chunks")

    def stores_again() -> bool:
        engine.evict()  # A chunk that the primary tier holds is not stored again.
        engine.store(_keys(2))
        return bool(agent.pool()["prefix"])

    wait_until(stores_again, what="the store after the reset")
    engine.evict()
    assert engine.load(_keys(2)) == 4


def test_a_chunk_that_leaves_between_lookup_and_load_is_absent(agents: Agents, start: Start) -> None:
    agent = agents.start("west")
    engine, second_engine = start(agent), start(agent)
    engine.store(_keys(1))
    engine.evict()
    context = engine.request(_keys(1))
    wait_until(
        lambda: engine.step() or engine.manager.secondary_tiers[0].lookup(_keys(1)[0], context) is LookupResult.HIT,  # type: ignore[func-returns-value]
        what="the verdict",
    )
    second_engine.manager.reset_cache()
    wait_until(lambda: agent.pool()["prefix"] == 0, what="the forgotten chunks")
    assert engine.load(_keys(1), context) == 0


def test_an_agent_that_hangs_costs_its_silence_and_serves_again(tmp_path: Any, start: Start) -> None:
    agents = Agents(tmp_path)
    agent = agents.start("west")
    engine = start(agent, silence_seconds="0.5s")
    engine.store(_keys(1))
    engine.evict()
    with paused(agent.process.pid):
        assert engine.load(_keys(1)) == 0
        engine.store(_keys(2))
    wait_until(lambda: engine.load(_keys(1)) == 4, what="the agent that goes on")
    agents.stop()


def test_a_restarted_agent_serves_again_from_its_ssd(tmp_path: Any, start: Start) -> None:
    agents = Agents(tmp_path)
    ssd = {"ssd-directory": str(tmp_path / "ssd"), "ssd-bytes": "16MiB"}
    agent = agents.start("west", **ssd)
    engine = start(agent)
    engine.store(_keys(1))
    wait_until(lambda: agent.status_page()["ssd"]["prefix"] == 4, what="the chunks on the SSD")
    agent.process.kill()
    agent.process.wait()
    engine.evict()
    assert engine.load(_keys(1)) == 0
    agents.start("west", **ssd)
    wait_until(lambda: engine.load(_keys(1)) == 4, what="the new agent")
    agents.stop()


def test_wrong_settings_and_absent_agents_stop_the_start(agents: Agents, start: Start) -> None:
    agent = agents.start("west")
    with pytest.raises(ConfigError, match="reuse"):
        start(agent, reuse=False)
    with pytest.raises(ConfigError, match="silence_seconds"):
        start(agent, silence_seconds="soon")
    with pytest.raises(AgentUnreachable):
        start(agent, agent_socket=str(agents.directory / "absent.sock"))
