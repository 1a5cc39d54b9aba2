"""Command `python -m tools.wan PROFILE [COMMAND...]`: run a shell or command at the near end of a long link."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from tools.wan import FAR, PROFILES, Wan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile", choices=PROFILES)
    parser.add_argument("--far", metavar="COMMAND", help="command to run at the far end, such as 'iperf3 -s'")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    flags = parser.parse_args()
    if flags.command[:1] == ["--far"]:
        parser.error("--far must precede the profile: the rest is the command of the near end")
    # Exit by an exception, so that the link is removed too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with Wan(PROFILES[flags.profile]) as wan:
        far = wan.far(["sh", "-c", flags.far], start_new_session=True) if flags.far else None
        print(f"near end of {flags.profile}, by {wan.carrier} ({wan.why}); the far end is {FAR}", flush=True)
        near = wan.near(flags.command or [os.environ.get("SHELL", "sh")])
        try:
            return near.wait()
        finally:
            near.terminate()
            if far is not None:
                os.killpg(far.pid, signal.SIGTERM)  # The command may be a child of the shell.
                far.wait()


if __name__ == "__main__":
    raise SystemExit(main())
