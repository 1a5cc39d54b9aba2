from typing import Any

import pytest

from prfaas.console.doctor.finding import bad, findings_table
from prfaas.console.tables import bit_rate, explanation_tables, link_mood, link_table, percent, size, status_tables
from prfaas.console.terminal import plain_text, show_table

LINK = {"peer": "west-0", "bytes_per_second": 6.25e8, "capacity_bytes_per_second": 1.25e9, "queued_bytes": "2048"}
STATE = {
    "manager": "m",
    "threshold_tokens": 16000,
    "index_stale": True,
    "nodes": [
        {
            "node": {
                "name": "east-0",
                "cluster": "east",
                "cluster_kind": "prfaas",
                "engines": [{"instance": "east-0/0", "role": "prefill", "model": "tiny"}],
            },
            "engines": [{"instance": "east-0/0", "num_running": 3, "kv_usage_ratio": 0.25}],
            "links": [LINK, LINK | {"peer": "north-0", "is_down": True}],
        }
    ],
}


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (1 << 41, "2.0 TiB"), (1 << 52, "4096.0 TiB")]
)
def test_sizes_are_in_the_largest_unit_that_leaves_a_whole(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_rates_are_in_bits_per_second() -> None:
    assert (bit_rate(125e6), bit_rate(0), percent(0.5)) == ("1.0 Gbit/s", "0 bit/s", "50.0%")


def test_links_that_are_down_come_first_and_stand_out() -> None:
    table = link_table(STATE)
    assert [(row[1], row[2]) for row in table.rows] == [("north-0", "down"), ("west-0", "5.0 Gbit/s")]
    assert table.moods == ("bad", "plain")
    assert table.rows[1][3:6] == ("10.0 Gbit/s", "50.0%", "2.0 KiB")
    assert link_mood({"retransmit_ratio": 0.05}) == "warning"
    assert link_mood({"congestion": "queue"}) == "warning"


def test_links_stand_in_a_line_each_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wide = {"bytes_per_second": 3.75e7, "queued_bytes": "1048576000", "rtt_seconds": 0.1801, "num_connections": 16}
    show_table(link_table({"nodes": [STATE["nodes"][0] | {"links": [LINK | wide]}]}))  # type: ignore[index]
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "east-0" in line)
    assert " ".join(line.split()) == "east-0 west-0 300.0 Mbit/s 10.0 Gbit/s 3.0% 1000.0 MiB 180.1 ms 0.0% 16"


def test_a_stale_index_and_what_runs_are_in_the_status() -> None:
    summary, clusters, instances = status_tables(STATE, {"plan": None})
    assert ("index", "stale: the record is unreachable") in summary.rows and "warning" in summary.moods
    assert clusters.rows == (("east", "prfaas", "1", "1", "3", "0"),)
    assert instances.rows[0][-3:] == ("3", "0", "25.0%")
    assert "east-0/0" in plain_text(instances)


def test_a_plan_is_named_with_its_limit() -> None:
    summary = status_tables(STATE, {"plan": {"version": 7, "limit": "link"}})[0]
    assert ("plan", "version 7, limited by link") in summary.rows


def test_what_to_do_stands_in_lines_that_a_narrow_terminal_does_not_break(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    remedy = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 net.core.default_qdisc=fq"
    show_table(findings_table([bad("send_buffer", "", "it bounds what a connection has in flight", remedy=remedy)]))
    assert f"send buffer: {remedy}" in capsys.readouterr().out.splitlines()


def test_an_instance_that_gets_nothing_new_says_so_in_the_status() -> None:
    *_, instances = status_tables(STATE | {"resting_instances": ["east-0/0"]}, {})
    assert [row[3] for row in instances.rows] == ["prefill, drains"] and instances.moods == ("warning",)


@pytest.mark.parametrize(
    ("changes", "role"),
    [
        ({"is_silent": True, "silent_seconds": 12.3}, "prefill, silent for 12 s"),
        ({"engines": [{"instance": "east-0/0", "is_silent": True}]}, "prefill, silent"),
    ],
)
def test_silent_nodes_and_engines_stand_out_in_the_status(changes: dict[str, Any], role: str) -> None:
    node = STATE["nodes"][0] | changes  # type: ignore[index]
    *_, instances = status_tables(STATE | {"nodes": [node], "resting_instances": ["east-0/0"]}, {})
    assert [row[3] for row in instances.rows] == [role] and instances.moods == ("bad",)


def test_an_explanation_has_phases_the_deciding_threshold_and_the_cost_of_each_route() -> None:
    instance = {"instance": "e/0", "cluster": "east", "role": "prefill", "agent": "e", "num_requests": 2}
    route = {"source": "east", "destination": "west", "threshold_tokens": 8254, "is_abundant": False, "is_down": False}
    record = {
        "decision": {"route": "remote", "reason": "long", "prefill": "e/0", "decode": "w/0"},
        "facts": {"num_prompt_tokens": 24577, "cached_tokens": {"e": 1024}},
        "ended": {"outcome": "completed", "ttft_seconds": 2.0, "phases": {"decide": 0.5, "wire": 1.5}},
        "threshold_tokens": 8254,
        "routes": [route | {"transfer_seconds": 0.25, "local_prefill_seconds": 1.5}],
        "snapshot": {"instances": [instance]},
    }
    request, phases, routes, candidates = explanation_tables(record)
    assert {("reason", "long"), ("threshold tokens", "8,254"), ("ttft", "2.00 s")} <= set(request.rows)
    assert phases.rows == (("decide", "500 ms", "25.0%"), ("wire", "1.50 s", "75.0%"))
    assert routes.rows == (("east → west", "8,254", "scarce", "250 ms", "1.50 s"),)
    assert candidates.rows == (("e/0", "east", "prefill", "2", "1,024", "prefills"),)
