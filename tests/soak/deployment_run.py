"""Run of a deployment across an emulated link, at the near end. It asks the parent process to change the link.

    python -m tests.soak.deployment_run DIRECTORY PLAN COMMAND_PREFIX...

`PLAN` is a JSON object with the keys of `Plan`. Each line on standard output is a link command, which the parent confirms
with a line, or the name of the file with the results.
"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.open_loop import OpenLoop
from tests.support.paused_process import resume, stop
from tests.support.process_deployment import MODEL, fresh_prompt
from tests.support.replicated_deployment import ROLES, ReplicatedDeployment, running_across, sums, until_sums_agree
from tests.support.waiting import until
from tools.wan import FAR, NEAR

HOSTS = {"west": NEAR, "east": FAR}
# All requests that a fault concerned have been answered by then. The odd part has each fault meet a request at another
# moment of its prefill.
SECONDS_BETWEEN = 15.4
DISK_MIB = 40
SSD = {"ssd_bytes": "24MiB"}
KILLED = ("agent w0", "agent w1", "agent e0", "agent e1", "engine e0/0", "engine e1/0")


@dataclass(frozen=True)
class Plan:
    """Load and faults of a run.

    Attributes:
        silences: Durations of silences of the link, in turn.
        random_seconds: Duration of random faults after them.
    """

    interval_seconds: float
    lengths: list[int]
    engine_flags: list[str]
    silences: list[float]
    random_seconds: float = 0.0
    seed: int = 0


class Run:
    """Deployment under load and faults."""

    def __init__(self, site: ReplicatedDeployment, plan: Plan, disk: Path) -> None:
        self._site, self._plan, self._disk = site, plan, disk
        self._random = random.Random(plan.seed)
        seed = plan.seed if plan.random_seconds else None
        self._load = OpenLoop(site.router_url, interval_seconds=plan.interval_seconds, lengths=plan.lengths, seed=seed)
        self.faults: list[tuple[str, float, float]] = []  # Name, begin and end in monotonic seconds.

    async def run(self) -> dict[str, Any]:
        """Return the results as JSON."""
        async with self._load.running():
            await until(lambda: len(self._load.answers) >= 4, seconds=90, what="answers before the faults")
            for seconds in self._plan.silences:
                await self._fault(f"silence {seconds:g} s", self._silence(seconds))
                await asyncio.sleep(SECONDS_BETWEEN)
            ends_at = time.monotonic() + self._plan.random_seconds
            while time.monotonic() < ends_at:
                await self._random_fault()
                await asyncio.sleep(self._random.uniform(1.0, 6.0))
        if self._plan.random_seconds:
            await until_sums_agree(self._site)
        return self._results()

    def _results(self) -> dict[str, Any]:
        site = self._site
        return {
            "answers": [
                {
                    "asked_at": answer.asked_at,
                    "num_tokens": answer.num_tokens,
                    "ttft_seconds": answer.ttft_seconds,
                    "is_whole": answer.outcome.is_whole,
                    "is_honest": answer.outcome.is_honest,
                    "error": answer.outcome.error,
                    "headers": dict(answer.outcome.headers),
                }
                for answer in self._load.answers
            ],
            "faults": self.faults,
            "records": site.records(),
            "sent": site.transfer_ends("sent"),
            "received": site.transfer_ends("received"),
            "fallbacks": site.transfer_ends("fallback"),
            "router": sums([site.router_url], "prfaas_router_requests_total", "outcome"),
            "managers": sums(site.manager_urls, "prfaas_manager_answered_requests_total", "outcome"),
        }

    async def _fault(self, name: str, fault: Awaitable[None]) -> None:
        began = time.monotonic()
        await fault
        self.faults.append((name, began, time.monotonic()))

    async def _random_fault(self) -> None:
        seconds = self._random.choice((1.0, 4.0, 8.0))
        role, killed = self._random.choice(ROLES), self._random.choice(KILLED)
        faults: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            (f"silence {seconds:g} s", lambda: self._silence(seconds)),
            (f"freeze of the {role} for {seconds:g} s", lambda: self._freeze(role, seconds)),
            (f"kill of {killed}", lambda: self._kill(killed)),
            ("slow clients", lambda: self._be_slow(seconds)),
            ("full disk", lambda: self._fill_disk(seconds)),
        ]
        name, fault = self._random.choice(faults)
        await self._fault(name, fault())

    async def _silence(self, seconds: float) -> None:
        await _command("silence")
        await asyncio.sleep(seconds)
        await _command("restore")

    async def _freeze(self, role: str, seconds: float) -> None:
        pid = self._site.child_of(role).process.pid
        stop(pid)
        await asyncio.sleep(seconds)
        resume(pid)

    async def _kill(self, name: str) -> None:
        await asyncio.to_thread(self._site.kill, name)

    async def _fill_disk(self, seconds: float) -> None:
        """Leave no room on the disk of w0's SSD tier."""
        filler = self._disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            for _ in range(DISK_MIB):
                file.write(bytes(1 << 20))
        await asyncio.sleep(seconds)
        filler.unlink()

    async def _be_slow(self, seconds: float) -> None:
        """Have clients that read nothing of their answers, and leave."""
        body = {"model": MODEL, "max_tokens": 2000, "stream": True}
        async with aiohttp.ClientSession() as session:
            url = f"{self._site.router_url}/v1/completions"
            asked = [session.post(url, json=body | {"prompt": fresh_prompt(100)}) for _ in range(4)]
            responses = await asyncio.gather(*asked)
            await asyncio.sleep(seconds)
            for response in responses:
                response.close()


async def _command(name: str) -> None:
    """Have the parent change the link."""
    sys.stdout.write(name + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)


@contextlib.contextmanager
def _small_disk(directory: Path) -> Iterator[Path]:
    """Mount a file system in memory that is soon full."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def main(argv: Sequence[str]) -> None:
    """Run the plan and write the results to a file."""
    directory, plan = Path(argv[0]), Plan(**json.loads(argv[1]))
    with _small_disk(directory / "disk") as disk:
        agents = {"w0": {"ssd_directory": str(disk / "ssd"), **SSD}}
        with running_across(directory, argv[2:], HOSTS, engine_flags=plan.engine_flags, agents=agents) as site:
            results = asyncio.run(Run(site, plan, disk).run())
    file = directory / "results.json"
    file.write_text(json.dumps(results | {"plan": asdict(plan)}))
    sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
