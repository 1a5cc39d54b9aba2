"""Every error that a caller can act on.

PrfaasError
├── ConfigError          a setting is unknown, malformed or out of range: stop the start
├── MissingExtraError    a command needs an optional dependency that is not installed
├── LayoutError          two layouts differ, or one cannot be described: refuse the registration
├── GrantError           a transfer without a valid grant: refuse it
├── IndexRefusal         an announcement or a query that the index cannot place: refuse it, count the reason
├── RecordUnreachable    Redis does not answer, or takes nothing more: go on from memory, say that it is stale
├── Fenced               another manager writes this cluster's record: stop writing, tell agents where to go
├── ManagerUnreachable   no manager answers in time: decide without it
├── PageUnreachable      a page over HTTP does not answer in time: say so, ask the next
├── AgentUnreachable     the agent's socket does not answer: stop the engine's start
├── LocalProtocolError   we broke a protocol: our bug
└── RemoteProtocolError  the peer broke a protocol: close the connection, count the reason
"""

from __future__ import annotations


class PrfaasError(Exception):
    """Base of all errors of this package."""


class ConfigError(PrfaasError):
    """A setting is unknown, malformed or out of range; the message names the key and the accepted form."""


class MissingExtraError(PrfaasError):
    """An optional dependency is absent; the message names the extra to install."""


class LayoutError(PrfaasError):
    """Two layouts differ, or a KV cache cannot be described; the message names what differs."""


class GrantError(PrfaasError):
    """A grant is forged, expired or for somebody else; `reason` is a closed word for logs and metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class IndexRefusal(PrfaasError):
    """An announcement or a query that the index cannot place; `reason` is a closed word for logs and metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RecordUnreachable(PrfaasError):
    """The durable record (Redis) does not answer or takes nothing more."""


class Fenced(PrfaasError):
    """Another manager writes this cluster's record; `writer` is its address, "" when it is not known."""

    def __init__(self, message: str, *, writer: str = "") -> None:
        super().__init__(message)
        self.writer = writer


class ManagerUnreachable(PrfaasError):
    """No manager answers within the deadline."""


class PageUnreachable(PrfaasError):
    """Nobody serves a page over HTTP within the deadline; the message names the page. `is_refusal`: it hung up, as those do
    that refuse a certificate."""

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class AgentUnreachable(PrfaasError):
    """Nobody answers at the agent's Unix socket."""


class LocalProtocolError(PrfaasError):
    """We were about to break a protocol."""


class RemoteProtocolError(PrfaasError):
    """The peer broke a protocol; `reason` is a closed word for logs and metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
