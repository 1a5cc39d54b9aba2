"""NUMA node of a GPU, and its CPUs."""

import os
from pathlib import Path

import torch

_SYSFS = Path("/sys")


def node_of(device: torch.device) -> int | None:
    """Return the NUMA node of a device, or None if it is no GPU or the node is not known."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return numa_node(f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0")


def numa_node(pci_address: str, sysfs: Path = _SYSFS) -> int | None:
    """Return the NUMA node of a device, or None where the system names none."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def node_cpus(node: int, sysfs: Path = _SYSFS) -> set[int]:
    """Return the CPUs of a NUMA node, or none if they cannot be read."""
    try:
        ranges = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().strip().split(",")
    except OSError:
        return set()
    ends = [item.split("-") for item in ranges if item]
    return {cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)}


def bind_thread(node: int) -> None:
    """Keep the calling thread on the CPUs of a node, as far as it may use them."""
    if cpus := node_cpus(node) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)
