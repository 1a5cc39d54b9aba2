"""Exceptions that cross packages, one class for each way that a caller reacts.

An exception that only its own package handles is defined next to the code that raises it.

PrfaasError
├── ConfigError          a setting is unknown, malformed or out of range: stop the start
├── MissingExtraError    a command needs an optional dependency that is not installed
├── LayoutError          two layouts differ, or one cannot be described: refuse the registration
├── GrantError           a transfer has no valid grant: refuse it
├── IndexRefusal         the index cannot place an announcement or a query: refuse it, count the reason
├── RecordUnreachable    Redis does not answer or accepts no writes: continue from memory, report stale data
├── FencedError          another manager writes this cluster's record: stop writing, redirect the agents to that manager
├── ManagerUnreachable   no manager answers in time: decide without one
├── PageUnreachable      an HTTP page does not answer in time: report it, ask the next server
├── AgentUnreachable     the agent's socket does not answer: stop the engine's start, or reattach later
├── LocalProtocolError   our own code broke a protocol: a bug
└── RemoteProtocolError  the peer broke a protocol: close the connection, count the reason
"""

from __future__ import annotations


class PrfaasError(Exception):
    """Base of all errors of this package."""


class ConfigError(PrfaasError):
    """A setting is unknown, malformed or out of range. The message names the key and the accepted form."""


class MissingExtraError(PrfaasError):
    """An optional dependency is absent. The message names the extra to install."""


class LayoutError(PrfaasError):
    """Two layouts differ, or a KV cache cannot be described. The message names the difference."""


class _CountedError(PrfaasError):
    """Base of errors that are counted by `reason`, a word of a closed set."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GrantError(_CountedError):
    """A grant is forged, expired or for another agent."""


class IndexRefusal(_CountedError):
    """The index cannot place an announcement or a query."""


class RecordUnreachable(PrfaasError):
    """The durable record (Redis) does not answer or accepts no writes."""


class FencedError(PrfaasError):
    """Another manager writes this cluster's record. `writer` is that manager's address, "" if unknown."""

    def __init__(self, message: str, *, writer: str = "") -> None:
        super().__init__(message)
        self.writer = writer


class ManagerUnreachable(PrfaasError):
    """No manager answers within the deadline. Without `was_connected` it cannot have got the call."""

    def __init__(self, message: str, *, was_connected: bool = True) -> None:
        super().__init__(message)
        self.was_connected = was_connected


class PageUnreachable(PrfaasError):
    """An HTTP page does not answer within the deadline. The message names the page.

    `is_refusal` is true when the server hung up, as servers do that reject a certificate.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class AgentUnreachable(PrfaasError):
    """No process answers at the agent's Unix socket."""


class LocalProtocolError(PrfaasError):
    """Our own code was about to break a protocol."""


class RemoteProtocolError(_CountedError):
    """The peer broke a protocol."""
