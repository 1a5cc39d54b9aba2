"""Link probes that arrive: grants, limits, and pauses between probes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import msgpack
import pytest

from prfaas import grants
from prfaas.agent.transfer.grant_check import GrantCheck
from prfaas.agent.transfer.link_probe import DEADLINE_SECONDS, PAUSE_SECONDS, InboundProbes
from prfaas.agent.transfer.open_body import encode_link_probe
from prfaas.errors import GrantError, RemoteProtocolError
from prfaas.grants import Grant
from prfaas.hashing import NO_HASH
from prfaas.transport.protocol.messages import ObjectSizes
from prfaas.transport.receiver.api import Acceptance, OpenRequest
from prfaas.types import AgentName, TransferId

KEY = b"g" * 32
MIB = 1 << 20
PROBE = TransferId(bytes(range(16)))
GRANT = Grant(
    PROBE,
    source=AgentName("east"),
    destination=AgentName("west"),
    destination_address="west:1",
    prompt_hash=NO_HASH,
    num_tokens=0,
    max_bytes=8 * MIB,
    tenant="",
    expires_at=time.time() + 3600.0,
    kind="probe",
)


class Site:
    """Probes that arrive at agent west, with a clock that the test moves."""

    def __init__(self, *, max_bytes: int = 4 * MIB) -> None:
        self.now = 0.0
        self.probes = InboundProbes(
            grant_check=GrantCheck(AgentName("west"), KEY), max_bytes=max_bytes, clock=lambda: self.now
        )

    def open(
        self,
        grant: Grant = GRANT,
        *,
        peer: str = "east",
        sizes: Sequence[int] = (MIB,) * 4,
        seconds: float = DEADLINE_SECONDS,
        key: bytes = KEY,
        transfer_id: bytes = b"",
    ) -> Acceptance:
        body = encode_link_probe(grants.sign(grant, key))
        request = OpenRequest(transfer_id or grant.transfer_id, peer, body, ObjectSizes.of(sizes), seconds)
        return self.probes.accept(request)

    def refuses(self, reason: str, grant: Grant = GRANT, **changes: object) -> None:
        with pytest.raises(GrantError) as raised:
            self.open(grant, **changes)  # type: ignore[arg-type]
        assert raised.value.reason == reason


def test_granted_probe_is_accepted_without_destination() -> None:
    site = Site()
    accepted = site.open()
    assert accepted.destination is None and not accepted.held
    assert PROBE in site.probes


@pytest.mark.parametrize(
    ("reason", "grant"),
    [
        ("not_ours", replace(GRANT, destination=AgentName("south"))),
        ("not_theirs", replace(GRANT, source=AgentName("south"))),
        ("other_use", replace(GRANT, kind="copy")),
        ("expired", replace(GRANT, expires_at=1.0)),
        ("too_large", replace(GRANT, max_bytes=4 * MIB - 1)),
    ],
)
def test_probe_with_unsuitable_grant_is_refused_by_reason(reason: str, grant: Grant) -> None:
    site = Site()
    site.refuses(reason, grant)
    assert site.open(), "a refusal does not start the pause"


def test_probe_beyond_the_limits_is_refused() -> None:
    site = Site()
    site.refuses("too_large", sizes=(MIB,) * 4 + (1,))
    site.refuses("too_long", seconds=DEADLINE_SECONDS + 1)
    site.refuses("forged", key=b"x" * 32)
    site.refuses("not_ours", transfer_id=bytes(16))
    Site(max_bytes=0).refuses("too_large", sizes=(1,))


def test_peer_must_pause_between_probes() -> None:
    site = Site()
    site.open()
    later = replace(GRANT, transfer_id=TransferId(bytes(16)))
    site.now = PAUSE_SECONDS - 1
    site.refuses("too_soon")
    site.refuses("too_soon", later)
    site.probes.ended(PROBE)
    assert site.open(replace(later, source=AgentName("south")), peer="south"), "another peer may"
    site.probes.ended(later.transfer_id)
    site.now = PAUSE_SECONDS
    assert site.open(later)


def test_only_one_probe_arrives_at_a_time() -> None:
    site = Site()
    site.open()
    second = replace(GRANT, transfer_id=TransferId(bytes(16)), source=AgentName("south"))
    site.refuses("probed", second, peer="south")
    site.probes.ended(second.transfer_id)
    site.refuses("probed", second, peer="south")
    site.probes.ended(PROBE)
    assert site.open(second, peer="south"), "a refusal does not start the pause"
    site.now = PAUSE_SECONDS
    assert site.open(), "no probe lasts so long"


@pytest.mark.parametrize("body", [["link_probe"], ["link_probe", 3], ["link_probe", b"", b""], ["link_probe", None]])
def test_malformed_link_probe_is_refused(body: list[object]) -> None:
    request = OpenRequest(PROBE, "east", msgpack.packb(body), ObjectSizes.of((MIB,)), 1.0)
    with pytest.raises(RemoteProtocolError):
        Site().probes.accept(request)
