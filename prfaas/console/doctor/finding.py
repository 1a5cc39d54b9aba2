"""Finding: the outcome of one check."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prfaas.console.tables import Mood, Table

Outcome = Literal["good", "warning", "bad"]


@dataclass(frozen=True)
class Finding:
    """Outcome of one check. `remedy` is an action, preferably a command; empty for good findings."""

    subject: str  # Name of the check, for programs.
    outcome: Outcome
    where: str  # Component or file that was checked; "" for the machine.
    message: str
    remedy: str = ""


def good(subject: str, where: str, message: str) -> Finding:
    return Finding(subject, "good", where, message)


def bad(subject: str, where: str, message: str, *, remedy: str) -> Finding:
    return Finding(subject, "bad", where, message, remedy)


def warning(subject: str, where: str, message: str, *, remedy: str) -> Finding:
    return Finding(subject, "warning", where, message, remedy)


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return the findings, worst first, with the remedies as lines below."""
    order = ("bad", "warning", "good")
    ranked = sorted(findings, key=lambda finding: order.index(finding.outcome))
    rows = tuple((item.outcome, item.subject.replace("_", " "), item.where, item.message) for item in ranked)
    moods: tuple[Mood, ...] = tuple(finding.outcome for finding in ranked)
    remedies = (f"{row[1]}: {item.remedy}" for row, item in zip(rows, ranked, strict=True) if item.remedy)
    return Table("Doctor", ("", "what", "where", "finding"), rows, moods, notes=tuple(dict.fromkeys(remedies)))
