"""The HTTP contract of KV indexers (Mooncake RFC #1403): /register, /unregister, /query and /query_by_hash, with states.

Answers count tokens, by engine or node and by tier. A node's `usable_tokens` is ours: what all of its KV groups can serve
together, where other indexers count attention blocks alone. A prompt with an adapter matches nothing; a salt
is the tenant under another name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from prfaas.errors import IndexRefusal
from prfaas.events import Tier
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS, HashChain, root_hash
from prfaas.index.engine_feed import EngineSource
from prfaas.index.index import Index
from prfaas.index.query import Query
from prfaas.manager.engine_indexer import EngineIndexer
from prfaas.types import InstanceId

_TIERS: dict[str, Tier] = {"gpu": "gpu", "cpu": "memory", "disk": "ssd"}
Answering = Callable[[dict[str, Any]], dict[str, Any]]


class IndexerPages:
    """Answers from the manager's index and from the engines that were registered here."""

    def __init__(self, index: Index, engines: EngineIndexer) -> None:
        self._index = index
        self._engines = engines

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/register", _page(self._register)),
            web.post("/unregister", _page(self._unregister)),
            web.post("/query", _page(self._query)),
            web.post("/query_by_hash", _page(self._query_by_hash)),
        ]

    def _register(self, body: dict[str, Any]) -> dict[str, Any]:
        instance = InstanceId(str(body["instance_id"]))
        source = EngineSource(instance, str(body["endpoint"]), str(body.get("replay_endpoint") or ""))
        self._engines.register(source, model=_model(body), block_tokens=int(body["block_size"]))
        return {"status": "ok"}

    def _unregister(self, body: dict[str, Any]) -> dict[str, Any]:
        known = self._engines.unregister(InstanceId(str(body["instance_id"])))
        return {"status": "ok" if known else "unknown"}

    def _query(self, body: dict[str, Any]) -> dict[str, Any]:
        model, tokens = _model(body), [int(token) for token in body["token_ids"]]
        tenant, salt = str(body.get("tenant_id") or ""), str(body.get("cache_salt") or "")
        chain = HashChain(root_hash(model, (salt or tenant).encode()), tokens)
        if body.get("lora_name") or (salt and tenant not in ("", salt)):
            return {"instances": {}}
        return self._answer(Query(model, b"".join(chain.units), len(tokens)))

    def _query_by_hash(self, body: dict[str, Any]) -> dict[str, Any]:
        """`block_hashes` are our unit hashes, one per 16 tokens, in hexadecimal."""
        units = b"".join(map(bytes.fromhex, body["block_hashes"]))
        return self._answer(Query(_model(body), units, len(units) // HASH_BYTES * HASH_UNIT_TOKENS))

    def _answer(self, query: Query) -> dict[str, Any]:
        query.check()
        found: dict[str, dict[str, Any]] = {}
        for match in self._engines.match(query).nodes:
            _of(found, match.node)["gpu"] = match.attention_tokens
        known = query.model in self._index.models()
        for word, tier in _TIERS.items() if known else ():
            for match in self._index.match(query, tiers=frozenset({tier})).nodes:
                _of(found, match.node)[word] = match.attention_tokens
        for match in self._index.match(query).nodes if known else ():
            its = _of(found, match.node)
            its |= {"usable_tokens": match.usable_tokens, "reason": match.reason, "cluster": match.cluster}
            its["longest_matched"] = match.attention_tokens
        for its in found.values():
            its["longest_matched"] = max(its["longest_matched"], *(its[word] for word in _TIERS))
        return {"instances": found}


def _of(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return found.setdefault(name, {"longest_matched": 0, **dict.fromkeys(_TIERS, 0)})


def _model(body: dict[str, Any]) -> str:
    return str(body.get("model_name") or body.get("model") or body["model_name"])


def _page(answer: Answering) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def page(request: web.Request) -> web.Response:
        try:
            return web.json_response(answer(await request.json()))
        except KeyError as error:
            return web.json_response({"error": f"field {error} is missing"}, status=400)
        except (IndexRefusal, ValueError, TypeError, OverflowError, AttributeError, web.RequestPayloadError) as error:
            return web.json_response({"error": str(error)}, status=400)

    return page
