"""Where a command's spans go, as its `traces_endpoint` says."""

from __future__ import annotations

from prfaas import tracing
from prfaas.cli import extras


def send(component: str, endpoint: str, *, instance: str) -> None:
    """Have the spans of this process sent to `endpoint`; when it is empty none are made.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """
    if not endpoint:
        return
    tracing.use(extras.load("prfaas.otlp", extra="tracing").OtlpTracer(component, endpoint, instance=instance))
