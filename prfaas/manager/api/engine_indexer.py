"""Engines that no agent stands beside, followed by this manager alone: what they have on their devices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prfaas.errors import IndexRefusal
from prfaas.hashing import HASH_UNIT_TOKENS
from prfaas.index.engine.feed import EngineCacheFeed, EngineSource
from prfaas.index.inventory import Inventory
from prfaas.index.memory.index import Index
from prfaas.index.query import Answer, Query
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.pool_events import PoolEvent
from prfaas.rpc.tasks import cancel_tasks
from prfaas.types import AgentName, ClusterName, InstanceId, Shard

_MAX_ENGINES = 4096


class EngineIndexer:
    """An index of its own: nothing of it is recorded, routed to or counted on by transfers."""

    def __init__(self) -> None:
        self._index = Index()
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        self._inventories: dict[InstanceId, Inventory] = {}  # a feed that ends late finds another one, or none

    def register(self, source: EngineSource, *, model: str, block_tokens: int) -> None:
        """Follow an engine with blocks of full attention; again for the same instance begins anew.

        Raises:
            IndexRefusal: the block size is none of ours, or there are too many.
        """
        if block_tokens <= 0 or block_tokens % HASH_UNIT_TOKENS:
            raise IndexRefusal("wrong_block_size", f"block_size {block_tokens} is not a multiple of {HASH_UNIT_TOKENS}")
        if len(self._tasks) >= _MAX_ENGINES:
            raise IndexRefusal("malformed", f"{_MAX_ENGINES} engines are followed already")
        self.unregister(source.instance)
        layer = LayerSlice("any", 0, 1, "uint8", "token")  # what a block weighs is not asked here
        layout = Layout(model, "", Shard(), (KVGroup("full_attention", block_tokens, (layer,)),))
        name = AgentName(source.instance)
        inventory = self._inventories[source.instance] = Inventory()

        def add_layout(its: Layout) -> None:
            inventory.add_layout(its)
            self._index.register(name, cluster=ClusterName(name), epoch=1, layouts=inventory.layouts)

        def publish(events: Iterable[PoolEvent]) -> None:
            if self._inventories.get(source.instance) is inventory:
                self._index.apply(name, inventory.apply(events))

        feed = EngineCacheFeed(source, layouts=lambda: (layout,), add_layout=add_layout, publish=publish)
        add_layout(layout)
        self._tasks[source.instance] = asyncio.create_task(feed.run(), name=f"events of {source.instance}")

    def unregister(self, instance: InstanceId) -> bool:
        """Follow an engine no longer; False when nobody did."""
        task = self._tasks.pop(instance, None)
        if task is None:
            return False
        task.cancel()
        del self._inventories[instance]
        self._index.forget(AgentName(instance))
        return True

    def match(self, query: Query) -> Answer:
        """What the followed engines have of a prompt; nothing of a model that none of them runs."""
        if query.model not in self._index.models():
            return Answer((), ())
        return self._index.match(query, tiers=frozenset({"gpu"}))

    def sweep(self, num_cells: int) -> None:
        """Reclaim memory of what is gone, as `Index.sweep`."""
        self._index.sweep(num_cells)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        self._inventories.clear()
        await cancel_tasks(tasks)
