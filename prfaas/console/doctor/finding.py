"""Finding: the outcome of one check."""

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
    "record",
    "cluster",
    "wire",
    "disk",
    "agent_socket",
]
Outcome = Literal["good", "warning", "bad"]


@dataclass(frozen=True)
class Finding:
    """Outcome of one check. `remedy` is an action, preferably a command; empty for good findings."""

    subject: Subject
    outcome: Outcome
    where: str  # Component or file that was checked; "" for the machine.
    message: str
    remedy: str = ""


def good(subject: Subject, where: str, message: str) -> Finding:
    return Finding(subject, "good", where, message)


def bad(subject: Subject, where: str, message: str, *, remedy: str) -> Finding:
    return Finding(subject, "bad", where, message, remedy)


def warning(subject: Subject, where: str, message: str, *, remedy: str) -> Finding:
    return Finding(subject, "warning", where, message, remedy)


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return the findings, worst first, with the remedies as lines below."""
    order = ("bad", "warning", "good")
    ranked = sorted(findings, key=lambda finding: order.index(finding.outcome))
    rows = tuple((item.outcome, item.subject.replace("_", " "), item.where, item.message) for item in ranked)
    moods: tuple[Mood, ...] = tuple(finding.outcome for finding in ranked)
    remedies = (f"{row[1]}: {item.remedy}" for row, item in zip(rows, ranked, strict=True) if item.remedy)
    return Table("Doctor", ("", "what", "where", "finding"), rows, moods, notes=tuple(dict.fromkeys(remedies)))
