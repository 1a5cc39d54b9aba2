"""NUMA node of a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from prfaas.connector.worker.numa import node_cpus, numa_node


def test_the_cpus_of_a_device_are_those_of_its_node(tmp_path: Path) -> None:
    device, node = tmp_path / "bus/pci/devices/0000:3b:00.0", tmp_path / "devices/system/node/node1"
    for directory in (device, node):
        directory.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (node / "cpulist").write_text("4-6,12\n")
    assert numa_node("0000:3b:00.0", tmp_path) == 1
    assert node_cpus(1, tmp_path) == {4, 5, 6, 12} and node_cpus(2, tmp_path) == set()
    (device / "numa_node").write_text("-1\n")  # As in a virtual machine.
    assert numa_node("0000:3b:00.0", tmp_path) is numa_node("0000:01:00.0", tmp_path) is None
