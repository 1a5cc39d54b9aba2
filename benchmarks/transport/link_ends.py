"""prfaas over an emulated link: both ends as processes in their namespaces, and their measurements."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.transport.hybrid_schedule import Ready
from benchmarks.transport.near_end import Content
from prfaas.console.authority import Authority
from tools.wan import FAR, Wan


class Ends:
    """Sending and receiving process, which live as long as the context."""

    def __init__(
        self,
        wan: Wan,
        *,
        congestion_control: str = "bbr",
        is_encrypted: bool = False,
        content: Content = "noise",
        pool_bytes: int = 1 << 30,
        silence_seconds: float = 3.0,
        **link: Any,
    ) -> None:
        """Create the ends. `pool_bytes` is the payload memory of each end, enough for all concurrent transfers."""
        self._wan = wan
        self._directory = tempfile.TemporaryDirectory()
        near, far = _certificates(Path(self._directory.name)) if is_encrypted else ([], [])
        self._far_settings = json.dumps(
            {
                "congestion_control": congestion_control,
                "tls": far,
                "pool_bytes": pool_bytes,
                "silence_seconds": silence_seconds,
            }
        )
        self._near_settings = json.dumps(
            {
                "congestion_control": congestion_control,
                "insecure_plaintext": True,
                "tls": near,
                "content": content,
                "pool_bytes": pool_bytes,
                "silence_seconds": silence_seconds,
                **link,
            }
        )

    def __enter__(self) -> Ends:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        module = [sys.executable, "-m"]
        self._far = self._wan.far([*module, "benchmarks.transport.far_end", self._far_settings], **pipes)
        port = _read(self._far)["address"].rpartition(":")[2]
        command = [*module, "benchmarks.transport.near_end", f"{FAR}:{port}", self._near_settings]
        self._near = self._wan.near(command, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._near, self._far):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._directory.cleanup()

    def transfer(
        self, num_bytes: int, *, num_layers: int, num_objects: int = 64, pause_seconds: float = 0.0
    ) -> Figures:
        """Measure one transfer, whose bytes are checked by a digest."""
        near = self._ask(
            "measure",
            num_objects=num_objects,
            object_bytes=num_bytes // num_objects,
            num_layers=num_layers,
            pause_seconds=pause_seconds,
        )
        return _figures(near, self._reports([near["transfer"]]), num_bytes)

    def scheduled(self, ready: Sequence[Ready]) -> Figures:
        """Measure a transfer whose objects become ready over time."""
        near = self._ask(
            "scheduled", sizes=[item.num_bytes for item in ready], at_seconds=[item.at_seconds for item in ready]
        )
        return _figures(near, self._reports([near["transfer"]]), sum(item.num_bytes for item in ready))

    def urgent(self, urgent_bytes: int, *, bulk_bytes: int, after_seconds: float) -> tuple[Figures, Figures]:
        """Measure an urgent transfer alone, and beside two bulk transfers."""
        near = self._ask("urgent", urgent_bytes=urgent_bytes, bulk_bytes=bulk_bytes, after_seconds=after_seconds)
        assert near["bulk_was_under_way"], "the bulk transfers ended before the urgent one"
        ids = [near["alone"]["transfer"], near["beside"]["transfer"], *(bulk["transfer"] for bulk in near["bulk"])]
        reports = self._reports(ids)
        return _figures(near["alone"], reports, urgent_bytes), _figures(near["beside"], reports, urgent_bytes)

    def crowd(self, num_transfers: int, *, crowd_bytes: int, own_bytes: int, after_seconds: float) -> dict[str, float]:
        """Measure one tenant's transfer alone, and beside many of another tenant, which do not end."""
        return self._ask(
            "crowd",
            num_transfers=num_transfers,
            crowd_bytes=crowd_bytes,
            own_bytes=own_bytes,
            after_seconds=after_seconds,
        )

    def health(self, *, seconds: float, idle_seconds: float) -> dict[str, Any]:
        """Sample the link's health, idle and busy. The transfers do not end."""
        return self._ask("health", seconds=seconds, idle_seconds=idle_seconds)

    def _ask(self, what: str, **question: Any) -> dict[str, Any]:
        assert self._near.stdin is not None
        self._near.stdin.write(json.dumps({"ask": what, **question}) + "\n")
        self._near.stdin.flush()
        return _read(self._near)

    def _reports(self, transfers: list[str]) -> dict[str, dict[str, Any]]:
        """Return the far end's reports of these transfers."""
        found = {}
        for _ in transfers:
            report = _read(self._far)
            found[report["transfer"]] = report
        assert set(found) == set(transfers)
        return found


@dataclass(frozen=True)
class Figures:
    """Figures of one transfer. `exposed_seconds` is the time from the last ready layer to the last arrived byte."""

    num_bytes: int
    began_ns: int  # Monotonic clock.
    ended_ns: int
    exposed_seconds: float
    cpu_seconds: float  # Processor time of both ends.
    num_connections: int
    saved_bytes: int  # Saved by packing since the link's start.

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        return self.cpu_seconds / (self.num_bytes / 1e9)


def _certificates(directory: Path) -> tuple[list[str], list[str]]:
    authority = Authority(directory)
    near, far = (authority.issue(name) for name in ("near", "far"))
    return tuple([str(issued.authority), str(issued.certificate), str(issued.key)] for issued in (near, far))  # type: ignore[return-value]


def _figures(near: dict[str, Any], reports: dict[str, dict[str, Any]], num_bytes: int) -> Figures:
    far = reports[near["transfer"]]
    assert (far["reason"], near["failure"]) == ("completed", ""), (far["reason"], near["failure"])
    assert far["digest"] == near["digest"], "the bytes arrived damaged"
    return Figures(
        num_bytes=num_bytes,
        began_ns=near["began_ns"],
        ended_ns=far["ended_ns"],
        exposed_seconds=(far["ended_ns"] - near["last_ready_ns"]) / 1e9,
        cpu_seconds=far["cpu_seconds"] + near["cpu_seconds"],
        num_connections=near["link"]["num_connections"],
        saved_bytes=near["link"]["saved_bytes"],
    )


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"an end of the measurement has ended with {process.wait()}")
    read: dict[str, Any] = json.loads(line)
    return read
