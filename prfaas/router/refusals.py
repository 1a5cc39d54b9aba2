"""What a client is told of a request that is not answered."""

from __future__ import annotations

import math

from aiohttp import web

from prfaas.router.admission import NotLetIn
from prfaas.router.answering import NobodyReady
from prfaas.router.legs import LegFailed
from prfaas.router.openai import BadRequest, error_body
from prfaas.router.paths import PathRefused

REFUSALS = (
    BadRequest,
    PathRefused,
    web.RequestPayloadError,
    web.HTTPRequestEntityTooLarge,
    NobodyReady,
    NotLetIn,
    LegFailed,
)


def error_response(status: int, message: str, *, kind: str) -> web.Response:
    """An error as OpenAI clients expect it."""
    body = error_body(message, kind=kind, code=status)
    return web.Response(status=status, body=body, content_type="application/json")


def refused(error: Exception, *, max_body_bytes: int) -> web.Response:
    """What a client is told of one of `REFUSALS`."""
    match error:
        case BadRequest():
            return error_response(400, str(error), kind="invalid_request_error")
        case PathRefused():
            return error_response(403, str(error), kind="permission_error")
        case web.RequestPayloadError():
            return error_response(400, f"the body cannot be read: {error}", kind="invalid_request_error")
        case web.HTTPRequestEntityTooLarge():
            return error_response(413, f"the body exceeds {max_body_bytes} bytes", kind="invalid_request_error")
        case NotLetIn(status=429):
            response = error_response(429, str(error), kind="rate_limit_error")
            response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
            return response
        case NotLetIn():
            return error_response(error.status, str(error), kind="authentication_error")
        case LegFailed():
            return _failed(error)
        case _:
            return error_response(503, str(error), kind="service_unavailable")


def _failed(failure: LegFailed) -> web.Response:
    """The engine's own error where it made one; otherwise that nobody could be reached."""
    if failure.answer is None:
        return error_response(503, f"{failure.reason}: no engine answered", kind="service_unavailable")
    headers = {"Content-Type": failure.answer.content_type}
    return web.Response(status=failure.answer.status, body=failure.answer.body, headers=headers)
