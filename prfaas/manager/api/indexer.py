"""HTTP contract of KV indexers (Mooncake RFC #1403), and the engines that it follows.

Answers count tokens by engine or node and by tier. `usable_tokens` of a node is an extension: the tokens that all its
KV groups can serve together, while other indexers count attention blocks alone. A prompt with an adapter, or with other
keys beside its tokens, matches nothing. A salt is the tenant under another name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from aiohttp import web

from prfaas import metrics
from prfaas.errors import IndexRefusal
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS, HashChain, root_hash
from prfaas.index.engine.feed import EngineCacheFeed, EngineSource
from prfaas.index.inventory import Inventory
from prfaas.index.memory.index import Index
from prfaas.index.query import MatchResult, Query
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.match import PrefixMatch
from prfaas.kv.parts import LayerSlice
from prfaas.manager.api.http import MAX_BODY_BYTES
from prfaas.pool_events import PoolEvent, Tier
from prfaas.rpc.tasks import cancel_tasks
from prfaas.types import AgentName, ClusterName, InstanceId, Shard

_MAX_ENGINES = 4096


class EngineIndexer:
    """Separate index of the device caches of engines without an agent.

    It is neither recorded nor used for routing or transfers.
    """

    def __init__(self) -> None:
        self._index = Index()
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        self._inventories: dict[InstanceId, Inventory] = {}  # A feed that ends late finds another inventory, or none.

    def register(self, source: EngineSource, *, model: str, block_tokens: int) -> None:
        """Follow an engine with full-attention blocks. Repeating the call starts again.

        Raises:
            IndexRefusal: the block size is not supported, or there are too many engines.
        """
        if block_tokens <= 0 or block_tokens % HASH_UNIT_TOKENS:
            raise IndexRefusal("wrong_block_size", f"block_size {block_tokens} is not a multiple of {HASH_UNIT_TOKENS}")
        if len(self._tasks) >= _MAX_ENGINES:
            raise IndexRefusal("malformed", f"{_MAX_ENGINES} engines are followed already")
        self.unregister(source.instance)
        layer = LayerSlice("any", 0, 1, "uint8", "token")  # The size of a block does not matter here.
        layout = Layout(model, "", Shard(), (KVGroup("full_attention", block_tokens, (layer,)),))
        name = AgentName(source.instance)
        inventory = self._inventories[source.instance] = Inventory()

        def add_layout(found: Layout) -> None:
            inventory.add_layout(found)
            self._index.register(name, cluster=ClusterName(name), epoch=1, layouts=inventory.layouts)

        def publish(events: Iterable[PoolEvent]) -> None:
            if self._inventories.get(source.instance) is inventory:
                self._index.apply(name, inventory.apply(events))

        feed = EngineCacheFeed(source, layouts=lambda: (layout,), add_layout=add_layout, publish=publish)
        add_layout(layout)
        self._tasks[source.instance] = asyncio.create_task(feed.run(), name=f"events of {source.instance}")

    def unregister(self, instance: InstanceId) -> bool:
        """Stop following an engine, and return whether it was followed."""
        task = self._tasks.pop(instance, None)
        if task is None:
            return False
        task.cancel()
        del self._inventories[instance]
        self._index.forget(AgentName(instance))
        return True

    def match(self, query: Query) -> MatchResult:
        """Return what the followed engines cache of a prompt; empty if none of them runs the model."""
        if query.model not in self._index.models():
            return MatchResult((), ())
        return self._index.match(query, tiers=frozenset({"gpu"}))

    def sweep(self, num_cells: int) -> None:
        """Reclaim memory, as `Index.sweep` does."""
        self._index.sweep(num_cells)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        self._inventories.clear()
        await cancel_tasks(tasks)


_TIERS: dict[str, Tier] = {"gpu": "gpu", "cpu": "memory", "disk": "ssd"}
# Fields that the block hashes of tokens do not cover.
_NOT_HASHED = ("lora_name", "lora_id", "mm_hashes", "extra_keys")
PageHandler = Callable[[dict[str, Any]], dict[str, Any]]


class IndexerPages:
    """Answers from the manager's index and from the registered engines."""

    def __init__(self, index: Index, engines: EngineIndexer) -> None:
        self._index = index
        self._engines = engines

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/register", _page("register", self._register)),
            web.post("/unregister", _page("unregister", self._unregister)),
            web.post("/query", _page("query", self._query)),
            web.post("/query_by_hash", _page("query_by_hash", self._query_by_hash)),
        ]

    def _register(self, body: dict[str, Any]) -> dict[str, Any]:
        instance = _instance(body)
        if self._index.epoch(AgentName(instance)) is not None:
            raise ValueError(f"instance_id {instance!r} is the name of a node")
        source = EngineSource(instance, _text(body, "endpoint"), _text(body, "replay_endpoint", ""))
        self._engines.register(source, model=_model(body), block_tokens=_integer("block_size", body["block_size"]))
        return {"status": "ok"}

    def _unregister(self, body: dict[str, Any]) -> dict[str, Any]:
        known = self._engines.unregister(_instance(body))
        return {"status": "ok" if known else "unknown"}

    def _query(self, body: dict[str, Any]) -> dict[str, Any]:
        model, tokens = _model(body), [_integer("token_ids", token) for token in _list(body, "token_ids")]
        tenant, salt = _text(body, "tenant_id", ""), _text(body, "cache_salt", "")
        chain = HashChain(root_hash(model, (salt or tenant).encode()), tokens)
        if any(body.get(name) for name in _NOT_HASHED) or (salt and tenant not in ("", salt)):
            return {"instances": {}}
        return self._answer(Query(model, b"".join(chain.units), len(tokens), with_world=_flag(body, "with_world")))

    def _query_by_hash(self, body: dict[str, Any]) -> dict[str, Any]:
        """MatchResult for `block_hashes`: unit hashes of 16 tokens each, in hexadecimal."""
        units = b"".join(map(bytes.fromhex, _list(body, "block_hashes")))
        num_tokens = len(units) // HASH_BYTES * HASH_UNIT_TOKENS
        return self._answer(Query(_model(body), units, num_tokens, with_world=_flag(body, "with_world")))

    def _answer(self, query: Query) -> dict[str, Any]:
        query.check()
        found: dict[str, dict[str, Any]] = {}
        for match in self._engines.match(query).nodes:
            _entry(found, match.node)["gpu"] = match.attention_tokens
        known = query.model in self._index.models()
        for word, tier in _TIERS.items() if known else ():
            for match in self._index.match(replace(query, with_world=False), tiers=frozenset({tier})).nodes:
                _entry(found, match.node)[word] = match.attention_tokens
        answer = self._index.match(query) if known else MatchResult((), (), world=PrefixMatch(0, 0, "nothing"))
        for match in answer.nodes:
            entry = _entry(found, match.node)
            entry |= {"usable_tokens": match.usable_tokens, "reason": match.reason, "cluster": match.cluster}
            entry["longest_matched"] = match.attention_tokens
        for entry in found.values():
            entry["longest_matched"] = max(entry["longest_matched"], *(entry[word] for word in _TIERS))
        world = {"world": answer.world._asdict()} if query.with_world and answer.world is not None else {}
        return {"instances": found, **world}


def _entry(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return found.setdefault(name, {"longest_matched": 0, **dict.fromkeys(_TIERS, 0)})


def _model(body: dict[str, Any]) -> str:
    """Return `model_name`, which some callers name `modelname` or `model`."""
    names = [name for name in ("model_name", "modelname", "model") if body.get(name)]
    return _text(body, names[0] if names else "model_name")


def _instance(body: dict[str, Any]) -> InstanceId:
    value = body["instance_id"]
    return InstanceId(str(value) if type(value) is int else _text(body, "instance_id"))


def _text(body: dict[str, Any], name: str, default: str | None = None) -> str:
    value = body[name] if default is None else body.get(name) or default
    if not isinstance(value, str) or not (value or default is not None):
        raise ValueError(f"{name}: write a text")
    return value


def _list(body: dict[str, Any], name: str) -> list[Any]:
    value = body[name]
    if not isinstance(value, list):
        raise ValueError(f"{name}: write a list")
    return value


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {value!r}; write true or false")
    return value


def _integer(name: str, value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{name}: {value!r} is not an integer")
    return value


def _page(call: str, answer: PageHandler) -> Callable[[web.Request], Awaitable[web.Response]]:
    def refused(reason: str, text: str, *, status: int = 400) -> web.Response:
        metrics.MANAGER_REFUSALS.labels(call=call, reason=reason).inc()
        return web.json_response({"error": text}, status=status)

    async def page(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("write an object")
            return web.json_response(answer(body))
        except KeyError as error:
            return refused("malformed", f"field {error} is missing")
        except IndexRefusal as error:
            return refused(error.reason, str(error))
        except web.HTTPRequestEntityTooLarge as error:
            return refused("malformed", f"the body is longer than {MAX_BODY_BYTES} bytes", status=error.status)
        except (ValueError, TypeError, OverflowError, web.RequestPayloadError) as error:
            return refused("malformed", str(error))

    return page
