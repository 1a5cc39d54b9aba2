"""The names of this machine's NVIDIA GPUs, as the driver tells them without its libraries."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia")


def gpu_names(driver: Path = DRIVER) -> str:
    """Each name once, in order, such as "NVIDIA H200"; empty where there is no such GPU."""
    names = set()
    for file in driver.glob("gpus/*/information"):
        with contextlib.suppress(OSError):  # it may be the driver's users' alone
            found = re.search(r"^Model:\s*(\S.*)$", file.read_text(errors="replace"), re.MULTILINE)
            if found:
                names.add(found[1].strip())
    return " + ".join(sorted(names))
