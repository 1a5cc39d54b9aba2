"""Time to first token over distance on real vLLM: layer by layer, store and forward, pull after prefill.

Two agents stand at the ends of an emulated link whose rate is chosen so that the prompt's KV takes as long on the wire as
its prefill takes to compute; the engines' requests do not cross the link, so the prefill leg is sent half a round trip
late. *Pull* is a prefill that leaves its blocks in the pool, and a transfer that begins when it has ended: its open, its
answer and its data take the one and a half round trips that telling the decode side, its question and its data take.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas import grants
from prfaas.cachepool.layout import Layout
from prfaas.grants import Grant
from prfaas.hashing import HashChain, root_hash
from prfaas.types import AgentName, TransferId
from tools.demo.client import complete, prompt_tokens
from tools.processes import Children
from tools.stack import START_SECONDS, AgentProcess, EngineProcess, Stack, attached_layout, engine_flags
from tools.tiny_models import VOCABULARY, make_model
from tools.wan import FAR, NEAR, PAYLOAD_RATIO, Wan, WanShape

FAMILY = "granite4h"
PROMPT_TOKENS = 4097
CHUNK_TOKENS = 256
ROUND_TRIPS = (0.030, 0.080)
REPEATS, WARM_UP = 7, 2
BAR_TRANSFER_RATIO = 0.15  # of the transfer time, beside one round trip
STORED_SECONDS = 0.3  # until a finished request's blocks are in the pool; not counted
WIRE_PORT = 7400


@dataclass
class Sites:
    """The decode engine near, two prefill engines far: one that pushes layers, one that stores and forwards."""

    wan: Wan
    near: AgentProcess
    far: AgentProcess
    decode: EngineProcess
    prefill: EngineProcess
    store_and_forward: EngineProcess
    key: bytes
    num_prompts: int = 0

    def prompt(self) -> list[int]:
        """One that nobody has seen."""
        self.num_prompts += 1
        return prompt_tokens(PROMPT_TOKENS, seed=self.num_prompts, vocabulary=VOCABULARY)

    def local_seconds(self) -> float:
        """The decode engine alone."""
        return self._ask(self.decode, self.prompt(), cache_salt=os.urandom(8).hex())

    def prefill_seconds(self) -> float:
        """The prefill engine alone, all tokens but the last."""
        return self._ask(self.prefill, self.prompt()[:-1], cache_salt=os.urandom(8).hex())

    def pushed_seconds(self, engine: EngineProcess) -> float:
        return self._through_both(engine, self.prompt(), late_seconds=self.wan.shape.rtt_seconds / 2)

    def pulled_seconds(self) -> float:
        prompt = self.prompt()
        computed = self._ask(self.prefill, prompt[:-1])
        time.sleep(STORED_SECONDS)
        return self.wan.shape.rtt_seconds / 2 + computed + self._through_both(self.prefill, prompt, late_seconds=0.0)

    def _through_both(self, engine: EngineProcess, prompt: Sequence[int], *, late_seconds: float) -> float:
        grant = self._grant(prompt)
        with ThreadPoolExecutor(2) as pool:
            decoding = pool.submit(
                self._ask, self.decode, prompt, kv_transfer_params=_params("do_remote_prefill", grant)
            )
            time.sleep(late_seconds)
            pool.submit(self._ask, engine, prompt[:-1], kv_transfer_params=_params("do_remote_decode", grant))
            return decoding.result()

    def _ask(self, engine: EngineProcess, prompt: Sequence[int], **extra: Any) -> float:
        body = {"model": FAMILY, "prompt": list(prompt), "temperature": 0, "max_tokens": 1, "ignore_eos": True}
        return complete(engine.url, body | extra).ttft_seconds

    def _grant(self, prompt: Sequence[int]) -> str:
        grant = Grant(
            transfer_id=TransferId(os.urandom(16)),
            source=AgentName(self.far.name),
            destination=AgentName(self.near.name),
            destination_address=self.near.wire,
            prompt_hash=HashChain(root_hash(FAMILY), prompt[:-1]).at(len(prompt) - 1),
            num_tokens=len(prompt) - 1,
            max_bytes=1 << 28,
            tenant="",
            expires_at=time.time() + 60.0,
        )
        return grants.to_text(grants.sign(grant, self.key))


def _params(direction: str, grant: str) -> dict[str, Any]:
    return {direction: True, "prfaas_grant": grant}


@contextmanager
def running_sites(directory: Path, wan: Wan) -> Iterator[Sites]:
    """Start agents and engines; they end with the context."""
    model = make_model(FAMILY, directory / FAMILY)
    with Children(directory) as children:
        stack = Stack(children, directory)
        near = stack.start_agent("near", inside=wan.inside("near"), listen=f"{NEAR}:{WIRE_PORT}")
        far = stack.start_agent("far", inside=wan.inside("far"), listen=f"{FAR}:{WIRE_PORT}")
        for agent in (near, far):
            children.wait_until(agent.child, agent.socket.exists, seconds=START_SECONDS)
        flags = engine_flags(chunk_tokens=CHUNK_TOKENS, max_model_len=PROMPT_TOKENS + 256)
        whole = ("benchmarks.connector.store_and_forward", "StoreAndForwardConnector")
        decode = stack.start_engine("decode", model, agent=near, role="kv_both", extra=flags)
        prefill = stack.start_engine("prefill", model, agent=far, role="kv_producer", extra=flags)
        stored = stack.start_engine("stored", model, agent=far, role="kv_producer", extra=flags, connector_class=whole)
        for engine in (decode, prefill, stored):
            stack.await_server(engine.child, engine.url)
        key = grants.derive_key(stack.secret_file.read_bytes(), "grant")
        yield Sites(wan, near, far, decode, prefill, stored, key)


def measure() -> dict[str, Any]:
    """The table, with what it was measured over."""
    with (
        tempfile.TemporaryDirectory(prefix="prfaas-distance-") as directory,
        Wan(WanShape(1e9, ROUND_TRIPS[0])) as wan,
        running_sites(Path(directory), wan) as sites,
    ):
        transfer_bytes = payload_bytes(attached_layout(sites.decode.child.log), PROMPT_TOKENS - 1)
        for _ in range(WARM_UP):
            sites.prefill_seconds()
            sites.local_seconds()
        prefill = statistics.median(sites.prefill_seconds() for _ in range(REPEATS))
        rows = [_row(sites, rtt, transfer_bytes, bytes_per_second=transfer_bytes / prefill) for rtt in ROUND_TRIPS]
    return {
        "family": FAMILY,
        "prompt_tokens": PROMPT_TOKENS,
        "transfer_bytes": transfer_bytes,
        "prefill_seconds": round(prefill, 4),
        "links": rows,
    }


def _row(sites: Sites, rtt_seconds: float, transfer_bytes: int, *, bytes_per_second: float) -> dict[str, Any]:
    sites.wan.set(WanShape(bytes_per_second * 8 / PAYLOAD_RATIO, rtt_seconds))
    ways: dict[str, Callable[[], float]] = {
        "local": sites.local_seconds,
        "layer by layer": lambda: sites.pushed_seconds(sites.prefill),
        "store and forward": lambda: sites.pushed_seconds(sites.store_and_forward),
        "pull after prefill": sites.pulled_seconds,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM_UP + REPEATS):
        for name, way in ways.items():
            value = way()
            if turn >= WARM_UP:
                seconds[name].append(value)
    local = statistics.median(seconds["local"])
    transfer = transfer_bytes / bytes_per_second
    return {
        "rtt_seconds": rtt_seconds,
        "bits_per_second": round(sites.wan.shape.bits_per_second),
        "transfer_seconds": round(transfer, 4),
        "ttft_seconds": {name: _spread(values) for name, values in seconds.items()},
        "beyond_local_seconds": {
            name: round(statistics.median(values) - local, 4) for name, values in seconds.items() if name != "local"
        },
        "bar_seconds": round(rtt_seconds + BAR_TRANSFER_RATIO * transfer, 4),
    }


def payload_bytes(layout: Layout, num_tokens: int) -> int:
    """What a transfer of a prompt of full attention and states carries."""
    linear = sum(its.block_bytes for its in layout.groups if its.kind == "linear_state")
    full = (its for its in layout.groups if its.kind == "full_attention")
    return linear + sum(its.block_bytes * -(-num_tokens // its.block_tokens) for its in full)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}
