"""Progress that the installation shows in the place of pip's lines."""

import re
import subprocess

from tools.reference_tables import ROOT

PIP = """\
Collecting torch==2.13.0
  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (180.5 MB)
Collecting tiny
  Using cached tiny-1.0-py3-none-any.whl (12 kB)
Installing collected packages: tiny, torch
"""


def test_installation_shows_large_downloads_with_sizes_and_no_list_of_packages() -> None:
    script = (ROOT / "tools/install.sh").read_text()
    (function,) = re.findall(r"^show_progress\(\) \{.*?^\}$", script, re.DOTALL | re.MULTILINE)
    command = ["bash", "-c", f"{function}\nshow_progress"]
    shown = subprocess.run(command, input=PIP, capture_output=True, text=True, check=True, timeout=30).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "[install] 180 MB torch (180 MB so far)" in lines
    assert not any("tiny" in line for line in lines)
    assert "unpacking 2 packages" in lines[-1]
