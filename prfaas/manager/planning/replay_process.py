"""Child process for one replay. In a thread of the manager the twin would delay the answers to routers."""

import asyncio
import contextlib
import ctypes
import pickle  # noqa: TID251 (both ends are this program)
import signal
import sys
from asyncio.subprocess import PIPE

import msgspec

from prfaas.errors import PrfaasError
from prfaas.manager.planning.replay import Replay, Verdict

TIMEOUT_SECONDS = 20.0  # The planner waits for the verdict.
_COMMAND = ("-P", "-c", "from prfaas.manager.planning.replay_process import main; main()")
_PR_SET_PDEATHSIG = 1


class ReplayFailed(PrfaasError):
    """The child process gave no verdict: do without, count the `reason` (timeout, killed or failed)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


async def run_in_child(replay: Replay, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Verdict:
    """Return the verdict of a replay. The child process ends with this call, and with this process.

    Raises:
        ReplayFailed: the process died, failed or took too long.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            status, answer, errors = await _answer(pickle.dumps(replay))
        if not status:
            return msgspec.json.decode(answer, type=Verdict)
    except TimeoutError as error:
        raise ReplayFailed("timeout", f"no verdict within {timeout_seconds:g} s") from error
    except (OSError, msgspec.DecodeError) as error:
        raise ReplayFailed("failed", str(error)) from error
    last = errors.decode(errors="replace").strip().rpartition("\n")[2]
    raise ReplayFailed("killed" if status < 0 else "failed", last or f"exit status {status}")


async def _answer(question: bytes) -> tuple[int, bytes, bytes]:
    """Return the exit status of a child process, and what it wrote on standard output and error."""
    child = await asyncio.create_subprocess_exec(sys.executable, *_COMMAND, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    try:
        answer, errors = await child.communicate(question)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        status = await child.wait()
    return status, answer, errors


def main() -> None:
    """Answer the replay on standard input. The kernel ends this process with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    verdict = pickle.load(sys.stdin.buffer).run()  # noqa: S301
    sys.stdout.buffer.write(msgspec.json.encode(verdict, enc_hook=float))
