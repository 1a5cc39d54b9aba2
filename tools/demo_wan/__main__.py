"""Command `python -m tools.demo_wan`."""

import signal
import sys

if __name__ == "__main__":
    # The imports take a second. Until `main` sets its own handlers, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tools.demo_wan.command import main

    sys.exit(main())
