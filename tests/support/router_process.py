"""A router and paced engines as processes of their own, so that tests can freeze, limit and measure them."""

import asyncio
import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from tests.support.paced_engine import PacedEngine
from tests.support.secret_files import write_deployment_secret
from tests.support.waiting import PATIENCE_SECONDS
from tools.demo.client import is_answering
from tools.free_ports import free_address
from tools.processes import Child, Children

ROUTER = "import sys; from prfaas.cli.router import main; sys.exit(main())"


@dataclass
class RouterProcess:
    """A running router, and its engines by name."""

    url: str
    router: Child
    engines: dict[str, Child]

    @property
    def resident_bytes(self) -> int:
        """Return the memory of the router's process."""
        return resident_bytes(self.router)


def resident_bytes(child: Child) -> int:
    """Return the memory of a process."""
    pages = int(Path(f"/proc/{child.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running_processes(
    directory: Path,
    *,
    prefill: Sequence[Mapping[str, Any]] = ({},),
    decode: Sequence[Mapping[str, Any]] = ({},),
    max_descriptors: int | None = None,
    **settings: Any,
) -> Iterator[RouterProcess]:
    """Run a router before engines with these fields of `PacedEngine`, and yield it once all engines answer."""
    with Children(directory) as children:
        engines, clusters = {}, []
        for cluster, kind, role, described in (("east", "prfaas", "prefill", prefill), ("west", "pd", "both", decode)):
            instances = []
            for number, engine_fields in enumerate(described):
                name, address = f"{cluster}-{number}", free_address()
                command = (sys.executable, "-m", "tests.support.router_process", address, json.dumps(engine_fields))
                engines[name] = children.start(name, command)
                instance = {"name": name, "url": f"http://{address}", "role": role, "agent": name}
                instances.append({**instance, "wire": "127.0.0.1:1"})
                _wait_for(children, engines[name], f"http://{address}/health")
            clusters.append({"name": cluster, "kind": kind, "instances": instances})
        listen, file = free_address(), directory / "router.yaml"
        secret_file = str(write_deployment_secret(directory))
        written = {"listen": listen, "secret_file": secret_file, "clusters": clusters, **settings}
        file.write_text(yaml.safe_dump(written))
        command = (sys.executable, "-c", _limited(max_descriptors) + ROUTER, "--config", str(file))
        router = children.start("router", command)
        _wait_for(children, router, f"http://{listen}/health")
        yield RouterProcess(f"http://{listen}", router, engines)


def _wait_for(children: Children, child: Child, url: str) -> None:
    children.wait_until(child, lambda: is_answering(url), seconds=PATIENCE_SECONDS)


def _limited(max_descriptors: int | None) -> str:
    """Return code that limits the descriptors of a process."""
    if max_descriptors is None:
        return ""
    number = resource.RLIMIT_NOFILE
    return f"import resource; resource.setrlimit({number}, ({max_descriptors}, {max_descriptors})); "


class _ForgetfulEngine(PacedEngine):
    """Paced engine that keeps no request, so that it can serve many large ones."""

    async def _complete(self, request: Any) -> Any:
        try:
            return await super()._complete(request)
        finally:
            self.bodies.clear()
            self.request_ids.clear()
            self.sessions.clear()


async def _serve(address: str, engine_fields: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(PacedEngine)}
    assert set(engine_fields) <= known, engine_fields
    await _ForgetfulEngine(**engine_fields).start(int(address.rpartition(":")[2]))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], json.loads(sys.argv[2])))
