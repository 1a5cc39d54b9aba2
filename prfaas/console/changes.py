"""Changes to a deployment, requested from the managers over gRPC under the operator's name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.json_format import MessageToDict

from prfaas.console.config import ConsoleConfig
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb


@asynccontextmanager
async def _managers(config: ConsoleConfig, secret: bytes) -> AsyncIterator[ManagerClient]:
    """Yield a client for the managers under the operator's name."""
    tls, deadline = config.tls.files(), config.timeout
    client = ManagerClient(config.managers, name=config.name, secret=secret, deadline_seconds=deadline, tls=tls)
    try:
        yield client
    finally:
        await client.close()


async def drain(config: ConsoleConfig, secret: bytes, *, node: str, seconds: float) -> dict[str, Any]:
    """Drain a node: send no new work there and copy its unique hot prefixes elsewhere, within `seconds`.

    Return what was copied and what still runs.

    Raises:
        ManagerUnreachable: no manager completes the change in time.
        IndexRefusal: the node is unknown or silent, or this name has no operator rights.
    """
    async with _managers(config, secret) as client:
        moved = _fields(await client.operate("Drain", pb.DrainRequest(node=node, timeout_seconds=seconds)))
    counts = {
        name: int(moved[name]) for name in ("num_prefixes", "moved_bytes", "num_requests_left", "num_engines_unknown")
    }
    return {"node": node, **counts}


async def undrain(config: ConsoleConfig, secret: bytes, *, node: str) -> dict[str, Any]:
    """Send work to a drained node again.

    Raises:
        ManagerUnreachable: no manager completes the change in time.
        IndexRefusal: the node is unknown or silent, or this name has no operator rights.
    """
    async with _managers(config, secret) as client:
        await client.operate("Undrain", pb.UndrainRequest(node=node))
    return {"node": node}


async def order_pool(
    config: ConsoleConfig, secret: bytes, *, nodes: Sequence[str], end_hash: bytes, order: str
) -> list[dict[str, Any]]:
    """Pin, unpin or remove the prefix that ends with a hash on nodes. Return each node's answer.

    Raises:
        ManagerUnreachable: no manager completes the change in time.
        IndexRefusal: a node is unknown or silent, or the manager does not take this order.
    """
    request = pb.OrderPoolRequest(end_hash=end_hash, order=order, timeout_seconds=config.timeout)
    found = []
    async with _managers(config, secret) as client:
        for node in nodes:
            request.node = node
            answer = _fields(await client.operate("OrderPool", request))
            found.append({"node": node, "outcome": answer["outcome"], **_bytes(answer)})
    return found


def _bytes(fields: dict[str, Any]) -> dict[str, int]:
    """Return the byte counts. Protobuf's JSON writes 64-bit numbers as text."""
    return {name: int(value) for name, value in fields.items() if name.endswith("_bytes")}


async def flip(config: ConsoleConfig, secret: bytes, *, node: str, role: str, seconds: float) -> list[dict[str, Any]]:
    """Give a node's instances another role, drained for at most `seconds`; each one's change, whose `num_requests_left` is
    None where nobody says what it runs.

    Raises:
        ManagerUnreachable: no manager completes the change in time.
        IndexRefusal: the node is unknown or silent, or the manager does not take this order.
    """
    async with _managers(config, secret) as client:
        response = await client.operate("SetRole", pb.SetRoleRequest(node=node, role=role, timeout_seconds=seconds))
    return [_change(_fields(change)) for change in response.changes]


def _change(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"num_requests_left": None} if fields.pop("is_load_unknown") else fields


def _fields(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found
