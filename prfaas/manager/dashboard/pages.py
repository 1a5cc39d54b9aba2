"""The dashboard over HTTP: its files out of the package, and the stream of events."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from importlib import resources

from aiohttp import web

from prfaas.manager.dashboard.feed import Feed

# Nothing but this server is ever asked for anything, whatever a name in the data says.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class _File:
    content_type: str
    body: bytes


class DashboardPages:
    """The routes under /dashboard/."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._files = _read_files()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._to_dashboard),
            web.get("/dashboard", self._to_dashboard),
            web.get("/dashboard/", self._file),
            web.get("/dashboard/events", self._events),
            web.get("/dashboard/{name}", self._file),
        ]

    async def close(self, app: web.Application) -> None:
        """End the streams, so that the server can."""
        await self._feed.close()

    async def _to_dashboard(self, request: web.Request) -> web.Response:
        raise web.HTTPFound("/dashboard/")

    async def _file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info.get("name", "index.html"))
        if found is None:
            raise web.HTTPNotFound
        return web.Response(body=found.body, headers={"Content-Type": found.content_type} | HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"} | HEADERS)
        await response.prepare(request)
        async for event in self._feed.events():
            await response.write(event)
        return response


def _read_files() -> dict[str, _File]:
    """The package's own files by name; nothing else can be asked for."""
    folder = resources.files("prfaas.manager.dashboard") / "static"
    return {its.name: _File(_content_type(its.name), its.read_bytes()) for its in folder.iterdir()}


def _content_type(name: str) -> str:
    guessed = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"{guessed}; charset=utf-8"
