"""What an agent tells its manager of its links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.agent.config import AgentConfig
from prfaas.agent.engine.protocol import Promised
from prfaas.agent.report import NodeReporter
from prfaas.errors import RemoteProtocolError
from prfaas.index.membership import LinkFigures
from prfaas.transport.sender.stats import LinkStats
from prfaas.types import AgentName
from tests.unit.agent.test_link_metrics import CHOKED


def _no_command(command: object) -> None:
    raise AssertionError(f"nobody commands {command}")


def _reporting(links: Callable[[], list[LinkStats]]) -> NodeReporter:
    return NodeReporter(
        AgentConfig(name="west-0", secret_file=Path("secret"), cluster="west", managers=("127.0.0.1:1",)),
        b"s" * 32,
        epoch=1,
        wire_address="127.0.0.1:7400",
        link_stats=links,
        on_copy=_no_command,
        on_pool=_no_command,
        on_probe=_no_command,
        layouts_of=lambda instance, model: (),
    )


async def test_figures_contain_congestion_and_limit_of_a_link() -> None:
    state = replace(CHOKED, queued_bytes=4, unacknowledged_bytes=3, is_down=False)
    assert _reporting(lambda: [state]).figures().links == (
        LinkFigures(
            AgentName("tokyo-1"),
            bytes_per_second=0.0,
            capacity_bytes_per_second=1e8,
            rtt_seconds=0.09,
            min_rtt_seconds=0.03,
            queued_bytes=7,
            retransmit_ratio=0.0,
            num_connections=8,
            queue_seconds=0.7,
            congestion="queue",
            limit="network",
        ),
    )


async def test_probe_is_not_reported_as_congestion() -> None:
    states = [
        replace(CHOKED, is_probing=its, queued_bytes=4, sent_bytes=100 * at)
        for at, its in enumerate((True, False, False), start=1)
    ]
    reporting = _reporting(lambda: [states.pop(0)])
    links = [reporting.figures().links[0] for _ in range(3)]
    assert [(link.rtt_seconds, link.queued_bytes > 0) for link in links] == [(0.03, False), (0.03, False), (0.09, True)]


async def test_few_segments_are_not_reported_as_loss() -> None:
    sent = (0, 48_000, 48_000 + 480_000)
    states = [
        replace(CHOKED, sent_bytes=its, retransmitted_bytes=its // 20, segment_bytes=1448, is_probing=False)
        for its in sent
    ]
    reporting = _reporting(lambda: [states.pop(0)])
    assert [reporting.figures().links[0].retransmit_ratio for _ in range(3)] == [0.0, 0.0, 0.05]


@pytest.mark.parametrize(("predicted", "found"), [(-30, 5), (30, -5), (1 << 32, 5), (30, 1 << 32)])
async def test_promise_out_of_range_breaks_the_protocol(predicted: int, found: int) -> None:
    with pytest.raises(RemoteProtocolError):
        _reporting(list).on_promise(Promised(predicted, found))
    _reporting(list).on_promise(Promised((1 << 32) - 1, 0))
