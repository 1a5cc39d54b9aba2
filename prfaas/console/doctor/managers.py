"""Check that managers answer and accept the deployment's secret."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prfaas.console.doctor.finding import Finding, bad, good
from prfaas.errors import FencedError, IndexRefusal, ManagerUnreachable
from prfaas.rpc.channel import Channel
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.transport.net.tls import CertificateFiles


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
