"""NUMA node of a GPU: its CPUs, and memory near it."""

import ctypes
import os
import platform
from pathlib import Path

import torch

_SYSFS = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235}  # System call that libc has no function for.
_PREFER = 1  # MPOL_PREFERRED
_WORD_BITS, _NUM_WORDS = 8 * ctypes.sizeof(ctypes.c_ulong), 16


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


def prefer_node(slots: torch.Tensor, node: int) -> bool:
    """Prefer a node for the slots' pages that nothing has touched yet; return whether that succeeded."""
    number = _MBIND.get(platform.machine())
    if number is None or node >= _NUM_WORDS * _WORD_BITS:
        return False
    words = (ctypes.c_ulong * _NUM_WORDS)()
    words[node // _WORD_BITS] = 1 << node % _WORD_BITS
    address, size = ctypes.c_void_p(slots.data_ptr()), ctypes.c_ulong(slots.nbytes)
    num_bits = ctypes.c_ulong(_NUM_WORDS * _WORD_BITS + 1)
    return not ctypes.CDLL(None).syscall(number, address, size, _PREFER, words, num_bits, 0)


def bind_thread(node: int) -> None:
    """Keep the calling thread on the CPUs of a node, as far as it may use them."""
    if cpus := node_cpus(node) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)
