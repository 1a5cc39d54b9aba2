"""`python -m tools.wan PROFILE [COMMAND...]`: a shell or a command at the near end of an emulated long link."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from tools.wan import FAR, PROFILES, Wan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile", choices=PROFILES)
    parser.add_argument("--far", metavar="COMMAND", help="run this at the far end meanwhile, such as 'iperf3 -s'")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    flags = parser.parse_args()
    if flags.command[:1] == ["--far"]:
        parser.error("--far stands before the profile, since what follows that is the command of the near end")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the link goes too
    with Wan(PROFILES[flags.profile]) as wan:
        far = wan.far(["sh", "-c", flags.far], start_new_session=True) if flags.far else None
        print(f"near end of {flags.profile}, by {wan.carrier} ({wan.why}); the far end is {FAR}", flush=True)
        near = wan.near(flags.command or [os.environ.get("SHELL", "sh")])
        try:
            return near.wait()
        finally:
            near.terminate()
            if far is not None:
                os.killpg(far.pid, signal.SIGTERM)  # the shell may not be what runs
                far.wait()


if __name__ == "__main__":
    raise SystemExit(main())
