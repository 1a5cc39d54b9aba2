"""Checks of the services that a component uses: managers, their record, and the cluster of a router."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from prfaas.console.doctor.finding import Finding, bad, good, warning
from prfaas.errors import ConfigError, FencedError, IndexRefusal, ManagerUnreachable, PrfaasError
from prfaas.index.store.redis_store import RedisStore
from prfaas.manager.config import ManagerConfig
from prfaas.router.config import RouterConfig
from prfaas.rpc.channel import Channel
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.transport.net.tls import CertificateFiles

Nodes = Sequence[Mapping[str, Any]]  # Nodes of a manager's /state.


def router_finding(router: RouterConfig, nodes: Nodes) -> Finding:
    """Check that a router's cluster has live nodes."""
    live = sorted({node["cluster"] for node in nodes if node["cluster_kind"] == "pd"})
    if router.cluster and router.cluster not in live:
        message = f"managers know no PD cluster {router.cluster}; every request would be refused (no_decode_instance)"
        known = f"write cluster: {' or '.join(live)}" if live else "name these managers in the settings of its agents"
        return bad("cluster", "router", message, remedy=f"{known}; start the agents of {router.cluster}; prfaas status")
    return good("cluster", "router", f"live PD clusters: {', '.join(live) or 'none'}")


def record_finding(manager: ManagerConfig, *, timeout_seconds: float) -> Finding:
    """Check that Redis answers and is usable. Write nothing."""
    if not manager.redis_url:
        return _embedded(manager)
    try:
        asyncio.run(_check(manager.redis_url, timeout_seconds))
    except ConfigError as error:
        remedy = "name another Redis in redis_url, or configure this one; docs: Which Redis"
        message = str(error).removeprefix("redis_url: ")
        return bad("record", "manager", f"redis_url: {message}", remedy=remedy)
    except PrfaasError as error:
        remedy = "start it, or correct redis_url; redis-cli -u URL ping"
        return bad("record", "manager", f"redis_url: {error}", remedy=remedy)
    return good("record", "manager", "the Redis at redis_url answers")


def _embedded(manager: ManagerConfig) -> Finding:
    if manager.redis_directory is None:
        remedy = "write redis_directory: /var/lib/prfaas/redis, or a redis_url"
        return warning("record", "manager", "index, plan and roles are lost when this manager ends", remedy=remedy)
    return good("record", "manager", f"an embedded Redis stores the record in {manager.redis_directory}")


async def _check(url: str, timeout_seconds: float) -> None:
    store = RedisStore(url, timeout_seconds=timeout_seconds)
    try:
        await store.check()
    finally:
        await store.close()


def manager_findings(
    addresses: Sequence[str],
    *,
    name: str,
    secret: bytes,
    tls: CertificateFiles | None,
    where: str,
    timeout_seconds: float,
) -> list[Finding]:
    """Return one finding per manager; asks each for a prefix of no model."""

    async def ask_all() -> list[Finding]:
        channels = [Channel(address, name=name, secret=secret, tls=tls) for address in addresses]
        try:
            return [await _ask(channel, where=where, timeout_seconds=timeout_seconds) for channel in channels]
        finally:
            for channel in channels:
                await channel.close()

    return asyncio.run(ask_all())


async def _ask(channel: Channel, *, where: str, timeout_seconds: float) -> Finding:
    try:
        await channel.call("Match", pb.MatchRequest(), timeout_seconds=timeout_seconds)
    except IndexRefusal as error:
        if error.reason == "unauthenticated":
            remedy = "copy the manager's secret_file to this machine; with TLS the certificate is for the name"
            return bad("manager_secret", where, f"{channel.address}: {error}", remedy=remedy)
    except ManagerUnreachable as error:
        host, _, port = channel.address.rpartition(":")
        remedy = f"start it, open the port, or set TLS alike on both sides; nc -vz {host} {port}"
        return bad("manager", where, str(error), remedy=remedy)
    except FencedError:
        pass
    return good("manager", where, f"{channel.address} answers and takes this secret")
