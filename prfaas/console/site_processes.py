"""Processes of one site, started from a folder that `prfaas init` wrote, without systemd or containers."""

import contextlib
import http.client
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prfaas import config
from prfaas.agent.config import AgentConfig
from prfaas.console.config import ConsoleConfig
from prfaas.console.pages import tls_of
from prfaas.console.site_files import ENGINE_SCRIPT
from prfaas.console.tables import Mood, Table
from prfaas.errors import ConfigError
from prfaas.manager.config import ManagerConfig
from prfaas.router.config import RouterConfig

STOP_SECONDS = 20.0
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 2.0
_TAIL_LINES = 10


@dataclass(frozen=True)
class SiteProcess:
    """One process of a site, with its files below `run`."""

    name: str
    command: tuple[str, ...]
    page: str  # Answers once the process is ready.
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "run" / f"{self.name}.log"

    @property
    def pid_file(self) -> Path:
        return self.folder / "run" / f"{self.name}.pid"

    def pid(self) -> int | None:
        """Return the process id while the process runs. Another process with a reused id does not count."""
        with contextlib.suppress(OSError, ValueError):
            pid, started = self.pid_file.read_text().split()
            return int(pid) if _start_time(int(pid)) == started else None
        return None

    def start(self) -> None:
        """Start the process in a session of its own, which outlives this command."""
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid_file.write_text(f"{process.pid} {_start_time(process.pid)}\n")

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def end(self) -> bool:
        """End the process and its children: with SIGTERM, after 20 s with SIGKILL. Return whether it ran."""
        pid = self.pid()
        if pid is None:
            return False
        _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self.pid() is not None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        _signal(pid, signal.SIGKILL)  # Includes children that outlived the process.
        self.pid_file.unlink(missing_ok=True)
        return True


def processes_of(folder: Path) -> list[SiteProcess]:
    """Return the processes of a site in the order of their start.

    Raises:
        ConfigError: the folder holds no site, or a file of it is wrong.
    """
    folder = folder.resolve()
    if not (folder / "agent.yaml").exists():
        raise ConfigError(f"{folder} holds no site; prfaas init writes one")
    agent = config.load(AgentConfig, component="agent", file=folder / "agent.yaml")
    engine = (f"{folder / ENGINE_SCRIPT}",)
    found = [
        _component("agent", folder, f"http://{agent.status_listen}/healthz"),
        SiteProcess("engine", engine, f"{agent.engines[0].url}/health", folder),
    ]
    if (folder / "manager.yaml").exists():
        manager = config.load(ManagerConfig, component="manager", file=folder / "manager.yaml")
        found.insert(0, _component("manager", folder, f"http://{manager.http_listen}/healthz"))
    if (folder / "router.yaml").exists():
        router = config.load(RouterConfig, component="router", file=folder / "router.yaml")
        found.append(_component("router", folder, f"https://{router.listen}/health"))
    return found


def _component(name: str, folder: Path, page: str) -> SiteProcess:
    command = (sys.executable, "-m", f"prfaas.cli.{name}", "--config", str(folder / f"{name}.yaml"))
    return SiteProcess(name, command, page, folder)


def start_all(folder: Path, *, within_seconds: float, tell: Callable[[str], None]) -> list[SiteProcess]:
    """Start what does not run yet, each process once the one before answers.

    Raises:
        ConfigError: a process ended, or was not ready in time. The message has the end of its log.
    """
    processes = processes_of(folder)
    console = config.load(ConsoleConfig, component="console", file=folder / "console.yaml")
    tls, deadline = tls_of(console.tls), time.monotonic() + within_seconds
    for process in processes:
        if process.pid() is None:
            process.start()
            tell(f"{process.name}: starting; log: {process.log}")
        while not _is_ready(process.page, tls):
            if process.pid() is None:
                raise ConfigError(f"{process.name} ended:\n{process.tail()}")
            if time.monotonic() > deadline:
                raise ConfigError(f"{process.name} was not ready within {within_seconds:.0f} s:\n{process.tail()}")
            time.sleep(_POLL_SECONDS)
    return processes


def _is_ready(page: str, tls: ssl.SSLContext | None) -> bool:
    try:
        with urllib.request.urlopen(page, timeout=_ANSWER_SECONDS, context=tls if page.startswith("https") else None):
            return True
    except (OSError, http.client.HTTPException):
        return False


def end_all(folder: Path) -> list[SiteProcess]:
    """End the processes of a site in the reverse order of their start. Return those that ran."""
    return [process for process in reversed(processes_of(folder)) if process.end()]


def processes_table(processes: list[SiteProcess]) -> Table:
    """Return the state of processes."""
    rows, moods = [], list[Mood]()
    for process in processes:
        pid = process.pid()
        rows.append((process.name, "ended" if pid is None else f"runs as {pid}", process.page, str(process.log)))
        moods.append("plain" if pid is None else "good")
    return Table("Processes", ("process", "state", "page", "log"), tuple(rows), tuple(moods))


def _start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot. Raise OSError if it has ended."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if state == "Z":
        raise ProcessLookupError(pid)
    return fields[18]


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
