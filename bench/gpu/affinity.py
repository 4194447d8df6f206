"""Where a GPU is. Linux says it by the GPU's PCI address. Never run on a GPU."""

from pathlib import Path

import cupy

_DEVICES = Path("/sys/bus/pci/devices")


def numa_node(index: int, folder: Path = _DEVICES) -> int | None:
    """The NUMA node next to a GPU; None where Linux does not say it."""
    try:
        node = int((folder / cupy.cuda.runtime.deviceGetPCIBusId(index).lower() / "numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None
