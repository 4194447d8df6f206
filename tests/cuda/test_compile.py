"""Every CUDA source compiles for every architecture, without spilling, within its bound of registers."""

import re

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.pathfinder")

from shardrt.kernels.cuda._compile import HERE, compile_with_log, resources

FILES = sorted(path.stem for path in HERE.glob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
TYPES = ("float", "double", "__half", "__nv_bfloat16")
REGISTERS = 128  # two blocks of 256 threads at least on each multiprocessor


def variants_of(file):
    """The macros that a file is compiled with: its first lines say `// Compiled with: NAME=a|b ...`."""
    text = (HERE / f"{file}.cu").read_text()
    elements = re.search(r"// ELEMENT: (.*)", text)
    kinds = elements.group(1).split() if elements else TYPES
    others = re.findall(r"// Macro: (\w+)=(\S+)", text)
    return [(("ELEMENT", kind), *others) for kind in kinds]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_it_compiles_without_spilling(file, arch):
    for defines in variants_of(file):
        _, log = compile_with_log(file, defines, arch)
        found = resources(log)
        assert found
        for kernel, taken in found.items():
            where = f"{file}.cu: {kernel} with {defines} on {arch}"
            assert taken.spilled_bytes == 0, f"{where} spills {taken.spilled_bytes} bytes"
            assert taken.stack_bytes == 0, f"{where} has a stack of {taken.stack_bytes} bytes"
            assert taken.registers <= REGISTERS, f"{where} takes {taken.registers} registers"
