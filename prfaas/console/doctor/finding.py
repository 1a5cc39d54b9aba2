"""One thing that was looked at, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prfaas.console.tables import Mood, Table

Subject = Literal[
    "configuration",
    "secret",
    "address",
    "port",
    "advertised_address",
    "plaintext",
    "keys",
    "socket_directory",
    "memory",
    "locked_memory",
    "open_files",
    "congestion_control",
    "send_buffer",
    "receive_buffer",
    "slow_start_after_idle",
    "tcp_options",
    "certificate_files",
    "certificate_key",
    "certificate_authority",
    "certificate_time",
    "certificate_name",
    "certificate_revoked",
    "key_mode",
    "clock",
    "manager",
    "manager_secret",
    "engine",
    "engine_model",
    "heartbeat",
    "record",
    "cluster",
    "cluster_kind",
    "node_name",
    "instance_name",
    "kv_events",
    "wire",
    "disk",
    "agent_socket",
]
Outcome = Literal["good", "warning", "bad"]


@dataclass(frozen=True)
class Finding:
    """`remedy` says what to do, best as a command; it is empty where all is well."""

    subject: Subject
    outcome: Outcome
    where: str  # the component or file looked at; "" for the machine
    message: str
    remedy: str = ""


def good(subject: Subject, where: str, message: str) -> Finding:
    return Finding(subject, "good", where, message)


def bad(subject: Subject, where: str, message: str, *, remedy: str) -> Finding:
    return Finding(subject, "bad", where, message, remedy)


def warning(subject: Subject, where: str, message: str, *, remedy: str) -> Finding:
    return Finding(subject, "warning", where, message, remedy)


def findings_table(findings: Sequence[Finding]) -> Table:
    """Worst first; what to do stands below, in lines that can be copied."""
    order = ("bad", "warning", "good")
    ranked = sorted(findings, key=lambda its: order.index(its.outcome))
    rows = tuple((its.outcome, its.subject.replace("_", " "), its.where, its.message) for its in ranked)
    moods: tuple[Mood, ...] = tuple(its.outcome for its in ranked)
    remedies = (f"{row[1]}: {its.remedy}" for row, its in zip(rows, ranked, strict=True) if its.remedy)
    return Table("Doctor", ("", "what", "where", "finding"), rows, moods, notes=tuple(dict.fromkeys(remedies)))
