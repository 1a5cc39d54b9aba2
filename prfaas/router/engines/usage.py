"""Usage figures of a hand-over: the prefill engine's cached tokens, in place of the decode engine's.

A decode engine counts all tokens that it receives as cached, although the prefill engine has computed them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from prfaas.router.engines.legs import EngineResponse

_DETAILS, _CACHED = "prompt_tokens_details", "cached_tokens"
_DATA = b"data: "


def cached_tokens(answer: Any) -> int:
    """Return the cached tokens that an engine's response reports; 0 if it reports none, as vLLM does for 0."""
    for name in ("usage", _DETAILS, _CACHED):
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer if isinstance(answer, int) else 0


def with_cached_tokens(body: bytes, num_cached_tokens: int) -> bytes:
    """Return a JSON object with this number in its usage. Without usage it stays as it is."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return body
    usage[_DETAILS] = {**(usage.get(_DETAILS) or {}), _CACHED: num_cached_tokens}
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass
class HandedOverResponse(EngineResponse):
    """Decode response whose usage reports the prefill engine's cached tokens. `head` takes the place of `first`."""

    head: bytes = b""
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, response: EngineResponse, num_cached_tokens: int) -> HandedOverResponse:
        return cls(
            response.response,
            response.instance,
            running=response.running,
            head=response.first,
            num_cached_tokens=num_cached_tokens,
        )

    async def rest(self) -> AsyncIterator[bytes]:
        """Yield the whole response, a stream in complete lines as they come."""
        chunks = super().rest()
        if self.response.content_type != "text/event-stream":
            whole = b"".join([self.head, *[chunk async for chunk in chunks]])
            yield with_cached_tokens(whole, self.num_cached_tokens)
            return
        lines, held = self._complete_lines(self.head)
        yield lines
        async for chunk in chunks:
            lines, held = self._complete_lines(held + chunk)
            if lines:
                yield lines
        yield self._rewritten(held)

    def _complete_lines(self, held: bytes) -> tuple[bytes, bytes]:
        """Return the complete lines with their usage replaced, and the start of the next line."""
        end = held.rfind(b"\n") + 1
        return b"".join(map(self._rewritten, held[:end].splitlines(keepends=True))), held[end:]

    def _rewritten(self, line: bytes) -> bytes:
        if not line.startswith(_DATA) or b'"usage"' not in line:
            return line
        content = line.removeprefix(_DATA).rstrip()
        ending = line[len(_DATA) + len(content) :]
        return _DATA + with_cached_tokens(content, self.num_cached_tokens) + ending
