"""Who may change a deployment, and the record of what they did."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal

from prfaas import logs, metrics
from prfaas.errors import Fenced, IndexRefusal

Action = Literal["drain", "undrain", "set_role", "pin", "soft_pin", "unpin", "remove"]
_audit = logs.get("manager.audit")


class Operators:
    """The names that may; with TLS they are those of certificates, so that nobody else can use them."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    @contextmanager
    def act(self, who: str, action: Action, *, target: str, **details: str) -> Iterator[None]:
        """Around what is done; a line and a count say who did what, and how it ended.

        Raises:
            IndexRefusal: `who` is no operator, or what the block raises.
        """
        outcome = "failed"
        try:
            if who not in self._names:
                outcome = "refused"
                raise IndexRefusal(
                    "unauthenticated", f"{who} is none of the operators ({', '.join(sorted(self._names))})"
                )
            yield
            outcome = "done"
        except Fenced:
            outcome = "elsewhere"  # the writer of the cluster does it, and records it
            raise
        finally:
            metrics.ADMIN_ACTIONS.labels(action=action, outcome=outcome).inc()
            _audit.info("admin.action", who=who, action=action, target=target, outcome=outcome, **details)
