"""Every CUDA source compiles for every architecture, without spilling, within its bound of registers.

Registers depend on the type, instructions on the architecture, and hardly on both.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.pathfinder")

from shardrt.kernels.cuda._compile import HERE, compile_with_log, files, variants
from shardrt.kernels.cuda._launch import STATIC_SHARED

TYPES = {
    "sm_80": ("__half",),
    "sm_90": ("float", "double", "__nv_bfloat16"),
    "sm_100": ("__nv_bfloat16",),
}
_SPILLS = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
REGISTERS = 128  # two blocks of 256 threads at least on each multiprocessor


@dataclass(frozen=True)
class Resources:
    """A kernel's resources, by ptxas."""

    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int  # static


def resources(log: str) -> dict[str, Resources]:
    """Kernel -> its resources, from ptxas's log."""
    found = {}
    pieces = re.split(r"Compiling entry function '(\w+)'", log)[1:]
    for name, text in zip(pieces[::2], pieces[1::2], strict=True):
        stack, stores, loads = map(int, re.search(_SPILLS, text).groups())
        registers = int(re.search(r"Used (\d+) registers", text).group(1))
        shared = re.search(r"(\d+) bytes smem", text)
        found[name] = Resources(registers, stores + loads, stack, int(shared.group(1)) if shared else 0)
    return found


@pytest.mark.parametrize("element, source", [("float", "__nv_bfloat16"), ("__nv_bfloat16", "float")])
@pytest.mark.parametrize("parts, registers", [(1, 40), (2, 48), (4, 64)])
def test_sums_of_few_parts_leave_room_for_more_blocks(element, source, parts, registers):
    """Six blocks of 256 threads, five, or four: each thread has a load of 16 bytes for each part."""
    defines = (("ELEMENT", element), ("SOURCE", source), ("PARTS", str(parts)))
    taken = resources(compile_with_log("sum_parts", defines, "sm_90")[1])["sum_parts"]
    assert taken.spilled_bytes == taken.stack_bytes == 0 and taken.registers <= registers


# No source has code for one architecture alone, and to the compiler float16 is as large as bfloat16.
CASES = [(file, arch) for file in files() for arch in TYPES]
SPREAD = [*((file, "sm_80") for file in files()[::4]), *((file, "sm_100") for file in files()[2::4])]
REST = [case for case in CASES if case[1] != "sm_90" and case not in SPREAD]


@pytest.mark.parametrize(
    "file, arch", [pytest.param(*case, marks=pytest.mark.rest if case in REST else ()) for case in CASES]
)
def test_it_compiles_without_spilling(file, arch):
    wanted = variants(file, TYPES[arch])
    dynamic = "DYNAMIC_SHARED(" in (HERE / f"{file}.cu").read_text()
    with ThreadPoolExecutor() as pool:  # NVRTC does not hold the interpreter's lock
        logs = list(pool.map(lambda defines: compile_with_log(file, defines, arch)[1], wanted))
    for defines, log in zip(wanted, logs, strict=True):
        found = resources(log)
        assert found
        for kernel, taken in found.items():
            where = f"{file}.cu: {kernel} with {defines} on {arch}"
            assert taken.spilled_bytes == 0, f"{where} spills {taken.spilled_bytes} bytes"
            assert taken.stack_bytes == 0, f"{where} has a stack of {taken.stack_bytes} bytes"
            assert taken.registers <= REGISTERS, f"{where} takes {taken.registers} registers"
            if dynamic:
                assert taken.shared_bytes <= STATIC_SHARED, (
                    f"{where} has {taken.shared_bytes} bytes beside it"
                )
