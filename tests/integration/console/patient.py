"""A machine on which all is well, to plant misconfigurations in: the kernel's files, a secret, an agent's settings."""

import socket
from pathlib import Path
from typing import Any

import yaml

from prfaas.console.authority import DAY, Authority, IssuedCertificate
from tests.integration.console.terminal import Ran, run_here
from tests.support.certificates import tls_record
from tests.support.deployment import SECRET
from tools.free_ports import free_address

SYSCTLS = {
    "net/ipv4/tcp_available_congestion_control": "reno cubic bbr",
    "net/ipv4/tcp_allowed_congestion_control": "reno cubic bbr",
    "net/ipv4/tcp_rmem": "4096\t131072\t67108864",
    "net/core/wmem_max": "16777216",
}


class Patient:
    """Files below `directory`; change them, then `examine`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.secret = directory / "secret"
        self.secret.touch(mode=0o600)
        self.secret.write_bytes(SECRET)
        self.agent: dict[str, Any] = {
            "name": "west-0",
            "listen": free_address(),
            "status_listen": free_address(),
            "secret_file": str(self.secret),
            "socket": str(directory / "agent.sock"),
            "pool_bytes": "64MiB",
        }
        self.manager: dict[str, Any] = {}
        self.router: dict[str, Any] = {}
        self.sidecar: dict[str, Any] = {}
        self.colocate: dict[str, Any] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.wire = f"127.0.0.1:{self._listener.getsockname()[1]}"  # Address of another machine's agent.
        self.set_kernel(**SYSCTLS)
        (directory / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")

    def close(self) -> None:
        self._listener.close()

    def set_kernel(self, **sysctls: str) -> None:
        """Write kernel settings, by their path below /proc/sys."""
        for name, text in sysctls.items():
            path = self.directory / "proc/sys" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    def certify(self, name: str = "west-0", authority: Authority | None = None, **issue: Any) -> IssuedCertificate:
        """Give the agent a certificate."""
        issued = (authority or Authority(self.directory)).issue(name, **{"valid_for": 90 * DAY} | issue)
        self.agent["tls"] = tls_record(issued)
        return issued

    def examine(self, *flags: str, pages: str = "") -> Ran:
        """Return the findings of `prfaas doctor`."""
        files = {"agent": self.agent, "manager": self.manager, "router": self.router, "sidecar": self.sidecar}
        files["colocate"] = self.colocate
        arguments = [f"--proc={self.directory / 'proc'}", f"--pages={pages}", *flags]
        for component, settings in files.items():
            if settings:
                path = self.directory / f"{component}.yaml"
                path.write_text(yaml.safe_dump(settings))
                arguments.append(f"--{component}={path}")
        return run_here("doctor", *arguments)
