"""The checker of races finds each mistake of broken.cu in its lines, and nothing where it is mended."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.cuda.races import Checker, Race

SOURCE = Path(__file__).with_name("broken.cu")
KERNELS = re.findall(r'extern "C" __global__ void (\w+)', SOURCE.read_text())


class Broken(Checker):
    sources = SOURCE.parent


def run(kernel, mended):
    """Two blocks of two warps, of which the last lacks an element."""
    defines = (("ELEMENT", "int"), *([("MENDED", "1")] if mended else []))
    out = np.zeros(4 * 64, np.int32)
    Broken().launch("broken", defines, kernel, (2, 1, 1), 64, (out, np.int32(63)), 256)
    return out


def text_of(kernel):
    """[(number, line)] of a kernel, or of the function that it calls."""
    lines = SOURCE.read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if f"void {kernel}(" in line)
    text = list(enumerate(lines, 1))[start : lines.index("}", start)]
    return text_of("sum_of_blocks") if any("sum_of_blocks(out" in line for _, line in text) else text


def comments(kernel, pattern):
    """[(number, what matches)] in the comments of a kernel's lines."""
    text = [(number, line.partition("//")[2]) for number, line in text_of(kernel)]
    return [(number, match) for number, comment in text for match in re.findall(pattern, comment)]


ENDING = [kernel for kernel in KERNELS if comments(kernel, "error: ")]


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel not in ENDING])
def test_a_mistake_is_found_in_its_lines(kernel):
    with pytest.raises(Race) as found:
        run(kernel, mended=False)
    expected = {f"broken.cu:{number}" for number, _ in comments(kernel, "first|second|only")}
    assert expected in map(set, found.value.lines), str(found.value)
    assert {line for each in found.value.lines for line in each} == expected, str(found.value)


@pytest.mark.parametrize("kernel", ENDING)
def test_what_is_undefined_ends_the_launch(kernel):
    ((number, message),) = comments(kernel, "error: (.*)")
    with pytest.raises(AssertionError, match=f"{message}.*broken.cu:{number}"):
        run(kernel, mended=False)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_found_where_it_is_mended(kernel):
    run(kernel, mended=True)


def test_votes_leave_out_lanes_that_have_ended(tmp_path):
    (tmp_path / "votes.cu").write_text("""
        extern "C" __global__ void votes(int* out) {
            __syncwarp();  // all lanes were there once
            __ballot_sync(0xffffffffu, 1);
            if (threadIdx.x % 2) return;
            out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
            out[threadIdx.x + 1] = __match_any_sync(0xffffffffu, 0u);
        }""")
    machine, out = Checker(), np.zeros(32, np.int32)
    machine.sources = tmp_path
    machine.launch("votes", (("ELEMENT", "int"),), "votes", (1, 1, 1), 32, (out,), 0)
    np.testing.assert_array_equal(out, 0x55555555)
