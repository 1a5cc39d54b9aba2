"""Destination of a command's spans, from the setting `traces_endpoint`."""

from __future__ import annotations

from prfaas import tracing
from prfaas.cli import extras


def send(component: str, endpoint: str, *, instance: str) -> None:
    """Send the spans of this process to `endpoint`. An empty endpoint turns spans off.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """
    if not endpoint:
        return
    tracing.use(extras.load("prfaas.otlp", extra="tracing").OtlpTracer(component, endpoint, instance=instance))
