"""Traffic for which another split is better than the one of the deployment file, before paced engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from prfaas.types import InstanceRole
from tests.support.process_deployment import Outcome, ProcessDeployment, ask, client, fresh_prompt, running_pd_cluster
from tools.demo.client import get_json, get_text

PREFILL_SECONDS_PER_TOKEN, TOKEN_SECONDS, SLOTS = 4e-4, 0.02, 4
PROMPT_TOKENS, ANSWER_TOKENS = 125, 60  # 20 prefills a second an instance, 3.3 answers: the file says 5 and 5
PROFILE = f"""
name: paced
hardware: none
source: what the engines are told
prefill: {{fit: coefficients, seconds_per_token: {PREFILL_SECONDS_PER_TOKEN}, seconds: 1.0e-6, min_tokens: 1, max_tokens: 4096}}
decode: {{points: [{{batch: 1, step: {TOKEN_SECONDS}}}, {{batch: {SLOTS}, step: {TOKEN_SECONDS}}}]}}
"""
FILE = """
model: internal-1t-hybrid
trace: "lognormal:mu=6.2,sigma=0.01,min=480,max=520,output=40"
pd:
  - {name: west, profile: paced.yaml, instances: 4}
"""
SETTINGS = {
    "local_policy": "pd",
    "plan_seconds": "2s",
    "role_change_seconds": "3s",
    "rebalance_bytes_per_second": "0Gbps",
}
FLAGS = (
    *("--prefill-seconds", "0", "--prefill-seconds-per-token", str(PREFILL_SECONDS_PER_TOKEN)),
    *("--token-seconds", str(TOKEN_SECONDS), "--decode-slots", str(SLOTS), "--bytes-per-token", "64"),
)
NUM_CLIENTS = 16  # Twice the decode slots.
ROLES: tuple[InstanceRole, ...] = ("prefill", "prefill", "decode", "decode")


@contextlib.contextmanager
def running_cluster(directory: Path, *, role_changes: str) -> Iterator[ProcessDeployment]:
    """Yield two PD-P and two PD-D instances, which suit the file's trace."""
    (directory / "paced.yaml").write_text(PROFILE)
    (directory / "deployment.yaml").write_text(FILE)
    settings: dict[str, Any] = SETTINGS | {
        "deployment": str(directory / "deployment.yaml"),
        "role_changes": role_changes,
    }
    with running_pd_cluster(directory, ROLES, engine_flags=FLAGS, **settings) as site:
        yield site


@contextlib.asynccontextmanager
async def load(site: ProcessDeployment, *, num_clients: int = NUM_CLIENTS) -> AsyncIterator[list[Outcome]]:
    """Yield the outcomes of clients that ask again after each answer. All have an answer when the block ends."""
    outcomes: list[Outcome] = []
    stopping = asyncio.Event()

    async def asks() -> None:
        async with client() as session:
            while not stopping.is_set():
                prompt = fresh_prompt(PROMPT_TOKENS)
                outcomes.append(await ask(session, site.router_url, prompt, num_tokens=ANSWER_TOKENS))

    asking = [asyncio.create_task(asks()) for _ in range(num_clients)]
    try:
        yield outcomes
    finally:
        stopping.set()
        await asyncio.gather(*asking)


def plan_of(site: ProcessDeployment) -> dict[str, Any]:
    return get_json(f"{site.manager_url}/plan")["plan"] or {}


def num_changes(site: ProcessDeployment, outcome: str) -> float:
    lines = get_text(f"{site.manager_url}/metrics").splitlines()
    lines_of_outcome = (
        line for line in lines if line.startswith("prfaas_manager_role_changes_total") and outcome in line
    )
    return sum(float(line.rpartition(" ")[2]) for line in lines_of_outcome)
