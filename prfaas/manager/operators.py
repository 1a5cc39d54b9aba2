"""Who may change a deployment, and the record of what they did."""

from __future__ import annotations

import asyncio
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
    def act(self, who: str, action: Action, *, target: str, **details: str) -> Iterator[dict[str, object]]:
        """Around what is done; lines and a count say who does what, and how it ended, with what the block adds to the dict.

        Raises:
            IndexRefusal: `who` is no operator, or what the block raises.
        """
        outcome, found = "failed", dict[str, object]()
        try:
            if who not in self._names:
                outcome = "refused"
                raise IndexRefusal(
                    "unauthenticated", f"{who} is none of the operators ({', '.join(sorted(self._names))})"
                )
            _audit.info("admin.begun", who=who, action=action, target=target, **details)
            yield found
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cut_off"  # who ordered it has left, or this manager ends
            raise
        except Fenced:
            outcome = "elsewhere"  # the writer of the cluster does it, and records it
            raise
        finally:
            metrics.ADMIN_ACTIONS.labels(action=action, outcome=outcome).inc()
            _audit.info("admin.action", who=who, action=action, target=target, outcome=outcome, **details, **found)
