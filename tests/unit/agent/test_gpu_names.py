"""What the NVIDIA driver says of a machine's GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.agent.report import gpu_names

INFORMATION = "Model: \t\t NVIDIA {}\nIRQ:   \t\t 0\nGPU UUID: \t GPU-0\n"


@pytest.mark.parametrize(
    ("models", "names"),
    [((), ""), (("H200", "H200"), "NVIDIA H200"), (("L20", "A100-SXM4-80GB"), "NVIDIA A100-SXM4-80GB + NVIDIA L20")],
)
def test_gpu_names_are_listed_once(models: tuple[str, ...], names: str, tmp_path: Path) -> None:
    for number, model in enumerate(models):
        gpu = tmp_path / f"gpus/0000:{number:02x}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(INFORMATION.format(model))
    assert gpu_names(tmp_path) == names


def test_unreadable_driver_entry_is_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "gpus/0").mkdir(parents=True)
    (tmp_path / "gpus/0/information").write_text("nothing")
    assert gpu_names(tmp_path) == ""
