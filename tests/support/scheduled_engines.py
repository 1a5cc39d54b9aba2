"""Engines of vLLM's own scheduler on two nodes with real agents, with KV groups of several kinds."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from prfaas.hashing import HashChain, root_hash
from tests.support.agent_nodes import Nodes
from tests.support.scheduled_engine import BLOCK_TOKENS, ScheduledEngine
from tests.support.vllm_caches import KDA, attention, caches_of, config_of
from tests.support.waiting import wait_until
from tools.demo.client import get_json
from tools.stack import AgentProcess
from tools.tiny_models import make_eagle

NUM_BLOCKS = 128
FULL = attention(block_size=BLOCK_TOKENS)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_TOKENS,
    num_kv_heads=FULL.num_kv_heads,
    head_size=FULL.head_size,
    dtype=FULL.dtype,
    sliding_window=100,
)
CHUNKS = ChunkedLocalAttentionSpec(
    block_size=BLOCK_TOKENS,
    num_kv_heads=FULL.num_kv_heads,
    head_size=FULL.head_size,
    dtype=FULL.dtype,
    attention_chunk_size=128,
)
CHECKPOINTS = replace(KDA, block_size=BLOCK_TOKENS, mamba_cache_mode="align")
SHAPES: dict[str, list[tuple[list[str], KVCacheSpec]]] = {
    "dense": [(["full.0", "full.1"], FULL)],
    "windowed": [(["window.0"], WINDOW), (["full.0"], FULL)],
    "chunked": [(["chunk.0"], CHUNKS), (["full.0"], FULL)],  # As Llama 4 has it.
    # As vLLM lays out Gemma 4: full attention with fewer bytes per token gets blocks of more tokens.
    "short windows": [(["window.0"], WINDOW), (["full.0"], attention(block_size=2 * BLOCK_TOKENS, num_kv_heads=1))],
    "recurrent": [(["state.0"], KDA), (["state.1"], KDA), (["full.0"], FULL)],
    "checkpointed": [(["state.0"], CHECKPOINTS), (["state.1"], CHECKPOINTS), (["full.0"], FULL)],
    "checkpointed and windowed": [(["state.0"], CHECKPOINTS), (["window.0"], WINDOW), (["full.0"], FULL)],
}


@dataclass
class ScheduledEngines:
    """Engines on two nodes that tests share, each with a model identity of its own."""

    nodes: Nodes
    model: Path
    identity: str
    engines: list[ScheduledEngine] = field(default_factory=list)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    @cached_property
    def drafting(self) -> dict[str, Any]:
        """Settings of an engine with a draft model that drafts three tokens in each step."""
        return {"num_drafts": 3, "eagle": make_eagle(self.model, self.model.parent / "eagle")}

    def start(
        self, agent: AgentProcess, shape: str, *, num_blocks: int = NUM_BLOCKS, **settings: Any
    ) -> ScheduledEngine:
        kv = config_of(*SHAPES[shape], num_blocks=num_blocks)
        if settings.get("num_drafts"):
            _make_room_for_drafts(kv, settings["num_drafts"], has_layer=settings.get("eagle") is not None)
        name = f"{agent.name}-engine of {self.identity}"
        engine = ScheduledEngine(
            self.model, agent.socket, kv, caches_of(kv), name=name, identity=self.identity, **settings
        )
        self.engines.append(engine)
        return engine

    def prefiller(self, shape: str, **settings: Any) -> ScheduledEngine:
        return self.start(self.nodes.east, shape, role="kv_producer", **settings)

    def decoder(self, shape: str, **settings: Any) -> ScheduledEngine:
        return self.start(self.nodes.west, shape, role="kv_both", **settings)

    def grant(self, prompt: Sequence[int], **changes: Any) -> str:
        prompt_hash = HashChain(root_hash(self.identity), prompt[:-1]).at(len(prompt) - 1)
        return self.nodes.grant(prompt, prompt_hash=prompt_hash, **changes)

    def deliver(self, prefiller: ScheduledEngine, decoder: ScheduledEngine, prompt: Sequence[int]) -> str:
        """Submit both legs of a prompt, prefill it, and wait until the decode engine can load it. Return its request."""
        grant = self.grant(prompt)
        decoding, prefilling = decoder.receive(prompt, grant), prefiller.send(prompt, grant)
        self.run_until_finished([prefilling], stepping=[prefiller])
        decoder.await_offer(decoding)
        return decoding

    def num_come(self) -> int:
        """Return the number of transfers that have come to the west, in all tests."""
        transfers = get_json(f"{self.nodes.west.status_url}/transfers")
        return sum((transfer["direction"], transfer["outcome"]) == ("in", "completed") for transfer in transfers)

    def run_until_finished(
        self, request_ids: Sequence[str], *, stepping: Sequence[ScheduledEngine] | None = None
    ) -> None:
        """Step engines in turn until these requests have ended: those named, or all."""

        def finished() -> bool:
            for engine in stepping or self.engines:
                engine.step()
            return set(request_ids) <= {request_id for engine in self.engines for request_id in engine.told.finished}

        wait_until(finished, what=f"the end of {request_ids}")

    def assert_nothing_is_left(self) -> None:
        for engine in self.engines:
            wait_until(lambda engine=engine: self._is_idle(engine), what="an idle engine")  # type: ignore[misc]
        self.nodes.assert_nothing_is_left()

    def _is_idle(self, engine: ScheduledEngine) -> bool:
        engine.step()
        # vLLM keeps the null block.
        return engine.num_free_blocks == engine.num_blocks - 1 and not engine.leftovers()


def _make_room_for_drafts(kv: KVCacheConfig, num_drafts: int, *, has_layer: bool) -> None:
    """Add a block for the state after each draft, and the layer of a draft model to the last group, as vLLM does."""
    for group in kv.kv_cache_groups:
        if isinstance(group.kv_cache_spec, MambaSpec):
            group.kv_cache_spec = replace(group.kv_cache_spec, num_speculative_blocks=num_drafts)
    if has_layer:
        group.layer_names = [*group.layer_names, "mtp.0"]
        group.is_eagle_group = True
