"""Report of a transfer's outcome in streamed responses.

vLLM returns a connector's `kv_transfer_params` in the response to a request, but not in a stream. So the generators of
its API server's streams are wrapped, and write the report as a comment before the last event.
"""

import functools
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from prfaas.transfer_report import to_comment

# Only an API server imports this module before it loads plugins.
_API_SERVER = "vllm.entrypoints.launchers.app"
_LAST_EVENT = "data: [DONE]"
Streams = Callable[..., AsyncIterator[str]]


def is_api_server() -> bool:
    """Return whether this process serves vLLM's API."""
    return _API_SERVER in sys.modules


def report_in_streams() -> None:
    """Wrap the generators of streams. A second call has no effect."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat  # noqa: PLC0415
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion  # noqa: PLC0415

    _wrap(OpenAIServingChat, "chat_completion_stream_generator")
    _wrap(OpenAIServingCompletion, "completion_stream_generator")


def _wrap(cls: type[Any], name: str) -> None:
    original = getattr(cls, name)
    if not hasattr(original, "__wrapped__"):
        setattr(cls, name, with_report(original))


def with_report(generator: Streams) -> Streams:
    """Return the generator of a stream, which also writes the report that its argument `result_generator` brings."""
    signature = inspect.signature(generator)

    @functools.wraps(generator)
    async def stream(*arguments: Any, **named: Any) -> AsyncIterator[str]:
        params: dict[str, Any] = {}
        bound = signature.bind(*arguments, **named)
        bound.arguments["result_generator"] = _noting(bound.arguments["result_generator"], params)
        async for event in generator(*bound.args, **bound.kwargs):
            if event.startswith(_LAST_EVENT) and (comment := to_comment(params)):
                yield comment
            yield event

    return stream


async def _noting(results: AsyncIterator[Any], params: dict[str, Any]) -> AsyncIterator[Any]:
    """Yield the results, and copy the `kv_transfer_params` of the last one into `params`."""
    async for result in results:
        output = result[1] if isinstance(result, tuple) else result
        params |= output.kv_transfer_params or {}
        yield result
