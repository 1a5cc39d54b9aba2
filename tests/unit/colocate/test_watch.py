"""Worker processes that are stopped."""

import os
import signal
import subprocess
from threading import Thread

from prfaas.colocate.watch import STOPPED_SECONDS, await_death


def test_a_worker_that_stays_stopped_is_killed_and_one_that_goes_on_is_not() -> None:
    with subprocess.Popen(["sleep", "600"]) as worker:
        watch = Thread(target=await_death, args=(worker.pid, os.pidfd_open(worker.pid)))
        watch.start()
        try:
            worker.send_signal(signal.SIGSTOP)
            worker.send_signal(signal.SIGCONT)
            watch.join(STOPPED_SECONDS + 1)
            assert watch.is_alive() and worker.poll() is None
            worker.send_signal(signal.SIGSTOP)
            assert worker.wait(timeout=60) == -signal.SIGKILL
        finally:
            worker.kill()
            watch.join()
