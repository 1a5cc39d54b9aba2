"""Exceptions that cross packages, one class for each way that a caller reacts.

An exception that only its own package handles is defined next to the code that raises it.
"""


class PrfaasError(Exception):
    """Base of all errors of this package."""


class ConfigError(PrfaasError):
    """A setting is unknown, malformed or out of range: stop the start. The message names the key and the accepted form."""


class MissingExtraError(PrfaasError):
    """An optional dependency is absent. The message names the extra to install."""


class LayoutError(PrfaasError):
    """Two layouts differ, or a KV cache cannot be described: refuse the registration. The message names the difference."""


class _CountedError(PrfaasError):
    """Base of errors that are counted by `reason`, a word of a closed set."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GrantError(_CountedError):
    """A grant is forged, expired or for another agent: refuse the transfer."""


class IndexRefusal(_CountedError):
    """The index cannot place an announcement or a query: refuse it."""


class RecordUnreachable(PrfaasError):
    """The durable record (Redis) does not answer or accepts no writes: continue from memory, report stale data."""


class FencedError(PrfaasError):
    """Another manager writes this cluster's record: stop writing, redirect the agents to `writer`, "" if unknown."""

    def __init__(self, message: str, *, writer: str = "") -> None:
        super().__init__(message)
        self.writer = writer


class ManagerUnreachable(PrfaasError):
    """No manager answers within the deadline: decide without one. Without `was_connected` it cannot have got the call."""

    def __init__(self, message: str, *, was_connected: bool = True) -> None:
        super().__init__(message)
        self.was_connected = was_connected


class PageUnreachable(PrfaasError):
    """An HTTP page does not answer within the deadline: report it, ask the next server. The message names the page.

    `is_refusal` is true when the server hung up, as servers do that reject a certificate.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class AgentUnreachable(PrfaasError):
    """No process answers at the agent's Unix socket: stop the engine's start, or reattach later."""


class LocalProtocolError(PrfaasError):
    """Our own code was about to break a protocol: a bug."""


class RemoteProtocolError(_CountedError):
    """The peer broke a protocol: close the connection, count the reason."""
