"""Memory near a GPU."""

import mmap
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from prfaas.connector.worker.numa import node_cpus, numa_node, prefer_node  # noqa: E402

_POLICIES = Path("/proc/self/numa_maps")


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


@pytest.mark.skipif(not _POLICIES.exists(), reason="needs a kernel with NUMA")
def test_shared_memory_prefers_a_node_for_every_process() -> None:
    """The policy belongs to the memory, so that another mapping shows it, too."""
    descriptor = os.memfd_create("numa-test")
    os.ftruncate(descriptor, 1 << 20)
    with mmap.mmap(descriptor, 1 << 20) as first, mmap.mmap(descriptor, 1 << 20) as second:
        slots = torch.frombuffer(first, dtype=torch.uint8)
        if not prefer_node(slots, 0):
            pytest.skip("the system allows no policy, as in a container")
        second[0] = 1
        found = [line for line in _POLICIES.read_text().splitlines() if "numa-test" in line]
        assert len(found) == 2 and all(" prefer:0 " in line for line in found)
        assert not prefer_node(slots, 1000), "there is no such node"
        del slots
    os.close(descriptor)
