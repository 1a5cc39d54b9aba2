"""Shutdown of child processes and their children."""

from pathlib import Path

from tests.support.waiting import wait_until
from tools.processes import Children

STAYS = """
trap '' TERM
sleep 100 &
echo $! > "$1"
trap - TERM
exec sleep 100
"""


def running(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_remaining_grandchild_is_killed(tmp_path: Path) -> None:
    written = tmp_path / "process"
    with Children(tmp_path) as children:
        parent = children.start("parent", ["sh", "-c", STAYS, "sh", str(written)])
        children.wait_until(parent, lambda: written.exists() and written.read_text() != "", seconds=90)
    wait_until(lambda: not running(int(written.read_text())))
