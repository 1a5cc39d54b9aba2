"""Checks of a machine's kernel settings for an agent."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas.agent.config import AgentConfig
from prfaas.cachepool.ssd import disk_bytes
from prfaas.console.doctor.finding import Finding, bad, good, warning
from prfaas.console.tables import size

MIN_SEND_BUFFER_BYTES = 4 << 20  # Bounds the bytes in flight of one connection; docs/transport.md.
MIN_RECEIVE_BUFFER_BYTES = 32 << 20  # The receive window must cover the bandwidth-delay product.
MIN_OPEN_FILES = 4096  # A connection and a few files for each of hundreds of peers.
_SYSCTLS = (
    "net/ipv4/tcp_available_congestion_control",
    "net/ipv4/tcp_allowed_congestion_control",
    "net/ipv4/tcp_rmem",
    "net/core/wmem_max",
)
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Machine:
    """Kernel settings of a machine. `sysctls` has the path below /proc/sys as key; unknown ones are absent."""

    sysctls: Mapping[str, str]
    available_bytes: int | None
    max_open_files: int
    max_locked_bytes: int
    has_gpu: bool

    @staticmethod
    def read(proc: Path) -> Machine:
        """Return this machine's settings from the files below `proc`."""
        return Machine(
            sysctls={name: text for name in _SYSCTLS if (text := _text(proc / "sys" / name)) is not None},
            available_bytes=_available_bytes(_text(proc / "meminfo") or ""),
            max_open_files=_limit(resource.RLIMIT_NOFILE),
            max_locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
            has_gpu=(proc / "driver/nvidia/version").exists(),
        )


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _limit(which: int) -> int:
    """Return the hard limit, up to which a service may raise the soft limit."""
    limit = resource.getrlimit(which)[1]
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _available_bytes(meminfo: str) -> int | None:
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) << 10 if "MemAvailable" in fields else None


def tcp_findings(machine: Machine, *, congestion_control: str) -> Iterator[Finding]:
    """Check that this machine can fill long links."""
    yield _congestion_control(machine.sysctls, congestion_control)
    yield _send_buffer(machine.sysctls.get("net/core/wmem_max"))
    yield _receive_buffer(machine.sysctls.get("net/ipv4/tcp_rmem"))


def _congestion_control(sysctls: Mapping[str, str], wanted: str) -> Finding:
    subject = "congestion_control"
    available = sysctls.get("net/ipv4/tcp_available_congestion_control", "").split()
    allowed = sysctls.get("net/ipv4/tcp_allowed_congestion_control", "").split()
    if wanted not in available:
        keep = f"echo tcp_{wanted} > /etc/modules-load.d/prfaas.conf"
        return bad(
            subject,
            "",
            f"the kernel has no {wanted}; losses would idle a long link",
            remedy=f"modprobe tcp_{wanted}; {keep}",
        )
    if wanted not in allowed:
        remedy = f'sysctl -w net.ipv4.tcp_allowed_congestion_control="{" ".join([*allowed, wanted])}"'
        return warning(subject, "", f"only root may use {wanted} here", remedy=remedy)
    return good(subject, "", f"{wanted} is there and allowed")


def _send_buffer(text: str | None) -> Finding:
    name = "net.core.wmem_max"
    if text is None or int(text) >= MIN_SEND_BUFFER_BYTES:
        return good("send_buffer", "", f"{name}: {text or 'not limited here'}")
    message = f"{name} is {size(int(text))}; it bounds what a connection has in flight"
    return bad("send_buffer", "", message, remedy=f"sysctl -w {name}={MIN_SEND_BUFFER_BYTES}")


def _receive_buffer(text: str | None) -> Finding:
    subject = "receive_buffer"
    if text is None or int(text.split()[2]) >= MIN_RECEIVE_BUFFER_BYTES:
        return good(subject, "", f"net.ipv4.tcp_rmem: {text}")
    least, usual, most = text.split()
    message = f"net.ipv4.tcp_rmem ends at {size(int(most))}; the window cannot cover a long link"
    return bad(subject, "", message, remedy=f'sysctl -w net.ipv4.tcp_rmem="{least} {usual} {MIN_RECEIVE_BUFFER_BYTES}"')


def disk_finding(directory: Path, ssd_bytes: int, *, where: str) -> Finding:
    """Return whether the disk is as large as what an agent is to keep there."""
    there = disk_bytes(directory)
    if ssd_bytes > there:
        message = f"ssd_bytes is {size(ssd_bytes)}, and the disk of {directory} has {size(there)}"
        return bad("disk", where, message, remedy=f"ssd_bytes: {there * 8 // 10 >> 20}MiB")
    return good("disk", where, f"room for {size(ssd_bytes)} in {directory}")


def room_findings(machine: Machine, agent: AgentConfig, *, where: str) -> Iterator[Finding]:
    """Yield whether this machine has room for an agent."""
    if machine.available_bytes is not None and agent.pool_bytes > machine.available_bytes:
        message = f"pool_bytes is {size(agent.pool_bytes)}, and {size(machine.available_bytes)} are available"
        yield bad("memory", where, message, remedy=f"pool_bytes: {machine.available_bytes * 8 // 10 >> 20}MiB")
    else:
        yield good("memory", where, f"room for a pool of {size(agent.pool_bytes)}")
    if machine.has_gpu and machine.max_locked_bytes < agent.pool_bytes:
        message = f"{size(machine.max_locked_bytes)} may be locked, and the pool is pinned where there is a GPU"
        yield bad("locked_memory", where, message, remedy="LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited")
    if machine.max_open_files < MIN_OPEN_FILES:
        message = f"{machine.max_open_files} files may be open"
        yield bad("open_files", where, message, remedy="LimitNOFILE=65536 in the unit, or ulimit -n 65536")
    else:
        yield good("open_files", where, f"{machine.max_open_files} files may be open")
