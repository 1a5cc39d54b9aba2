"""HTTP routes of the dashboard: static files, figures of a time range, the event stream."""

import asyncio
import math
import mimetypes
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from aiohttp import web

from prfaas.manager.dashboard.feed import MAX_WATCHERS, SAMPLES, Feed
from prfaas.types import ClusterName

# The browser contacts this server only, whatever the data contains.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_WRITE_SECONDS = 5.0  # Limit for one event to a browser that has stopped reading.


class DashboardPages:
    """Routes under /dashboard/."""

    def __init__(self, feed: Feed, managers: Callable[[], Awaitable[Mapping[ClusterName, str]]]) -> None:
        """`managers` returns the writer of each cluster."""
        self._feed, self._managers = feed, managers
        self._files = _read_files()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._to_dashboard),
            web.get("/dashboard", self._to_dashboard),
            web.get("/dashboard/", self._file),
            web.get("/dashboard/events", self._events),
            web.get("/dashboard/figures", self._figures),
            web.get("/dashboard/managers", self._known_managers),
            web.get("/dashboard/{name:.+}", self._file),
        ]

    async def close(self, app: web.Application) -> None:
        """End the streams, so that the server can stop."""
        await self._feed.close()

    async def _to_dashboard(self, request: web.Request) -> web.Response:
        raise web.HTTPFound("/dashboard/")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "index.html")
        if name not in self._files:
            raise web.HTTPNotFound
        guessed = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return web.Response(body=self._files[name], headers={"Content-Type": f"{guessed}; charset=utf-8"} | HEADERS)

    async def _figures(self, request: web.Request) -> web.Response:
        try:
            seconds = float(request.query.get("seconds", "900"))
        except ValueError:
            seconds = math.nan
        if not 1 <= seconds <= SAMPLES:
            return _refusal(400, f"seconds: a number from 1 to {SAMPLES}")
        return web.json_response(self._feed.figures(seconds, request.query), headers=HEADERS)

    async def _known_managers(self, request: web.Request) -> web.Response:
        return web.json_response(await self._managers(), headers=HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if not self._feed.enter():
            return _refusal(503, f"{MAX_WATCHERS} pages watch this manager already")
        try:
            return await self._watched(request)
        finally:
            self._feed.leave()

    async def _watched(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"} | HEADERS)
        await response.prepare(request)
        async for event in self._feed.events():
            try:
                async with asyncio.timeout(_WRITE_SECONDS):
                    await response.write(event)
            except (TimeoutError, ConnectionResetError):  # The browser has stopped reading, or has gone.
                break
        return response


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _read_files() -> dict[str, bytes]:
    """Return the package's files by path. Nothing else is served."""
    folder = Path(__file__).with_name("static")
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
