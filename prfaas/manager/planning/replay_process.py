"""Child process for one replay. In a thread of the manager the twin would delay the answers to routers."""

import asyncio
import contextlib
import pickle  # noqa: TID251 (both ends are this program)
import sys
from asyncio.subprocess import PIPE

import msgspec

from prfaas import logs, metrics
from prfaas.manager.planning.replay import Replay, Verdict

TIMEOUT_SECONDS = 20.0  # The planner waits for the verdict.
# The kernel sends it SIGKILL when the manager ends for any reason (PR_SET_PDEATHSIG, 1).
_CHILD = """
import ctypes, msgspec, pickle, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
verdict = pickle.load(sys.stdin.buffer).run()
sys.stdout.buffer.write(msgspec.json.encode(verdict, enc_hook=float))
"""
_log = logs.get("manager")


async def confirm(replay: Replay, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Verdict:
    """Return the verdict of the twin. If the replay fails, no split is better, and the need does not shrink."""
    if not replay.is_due:
        return Verdict(replay.needed)
    try:
        async with asyncio.timeout(timeout_seconds):
            status, answer, errors = await _run(pickle.dumps(replay))
        if not status:
            return msgspec.json.decode(answer, type=Verdict)
        reason, error = "killed" if status < 0 else "failed", errors.strip().decode(errors="replace")
    except TimeoutError:
        reason, error = "timeout", f"no verdict within {timeout_seconds:g} s"
    except (OSError, msgspec.DecodeError) as failure:
        reason, error = "failed", str(failure)
    metrics.FAILED_REPLAYS.labels(reason=reason).inc()
    _log.warning("plan.replay_failed", reason=reason, error=error)
    return Verdict(replay.without_fewer(), failure=f"{reason}: {error.splitlines()[-1] if error else 'no message'}")


async def _run(question: bytes) -> tuple[int, bytes, bytes]:
    """Return the exit status of a child process, and what it wrote on standard output and error."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _CHILD), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        answer, errors = await child.communicate(question)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.communicate()  # Its end is not noticed before all that it wrote has been read.
    return await child.wait(), answer, errors
