"""The numerical tests in each class of processor: `python -m tests.processors [--only CLASS,...] [-n JOBS]`.

A class below this machine's own is imitated by environment: each library is given the kernels, and each
compiler the instructions, that it would choose there. A class above it is not run, and the table says so.
Other arguments are pytest's. Another program runs as on a class by
`env $(python -m tests.processors --environment CLASS) PROGRAM`.
"""

import os
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path

from llvmlite.binding import get_host_cpu_features
from numpy._core import _multiarray_umath

from tests.__main__ import BESIDE, NOTHING_TO_RUN, named, side_by_side

FOLDER = Path(__file__).parent
NUMERICAL = (
    *("kernels", "functional", "fsdp", "optim", "parallel", "parity", "train/test_world_invariant.py"),
    *("test_autograd.py", "test_tensor.py", "test_layers.py", "test_norms.py", "test_moe.py", "test_lora.py"),
    *("test_recompute.py", "test_activation_offload.py", "test_deferred_gradients.py", "test_determinism.py"),
)
# What `make test` runs in one class below the machine's own: the promises that rest on how libraries compute.
SLICE = (
    *("kernels/test_onednn.py", "kernels/test_bits.py", "kernels/test_sums.py"),
    *("functional/test_linear.py", "fsdp/test_pieces.py", "fsdp/test_same_bits.py"),
)


@dataclass(frozen=True)
class Processor:
    """A class of x86-64 processors.

    flags: what the kernel says of one. openblas, numba, onednn: what the libraries call it; "": oneDNN is not
    installed. vectors: bits of the widest. lacks: how names of features begin that are switched off.
    """

    name: str
    flags: str
    openblas: str
    numba: str
    onednn: str
    vectors: int
    lacks: tuple[str, ...]

    def runs_on(self, flags: set[str]) -> bool:
        """Whether a machine with these flags has all of its instructions."""
        return set(self.flags.split()) <= flags

    def environment(self) -> dict[str, str]:
        """Variables with which a process computes as on this class."""
        numpys = [name for name in _numpy_features() if name.lower().startswith(self.lacks)]
        llvms = get_host_cpu_features()
        for name in llvms:
            llvms[name] = llvms[name] and not name.startswith(self.lacks)
        variables = {
            "OPENBLAS_CORETYPE": self.openblas,
            "NUMBA_CPU_NAME": self.numba,
            "NUMBA_CPU_FEATURES": llvms.flatten(),
            "NPY_DISABLE_CPU_FEATURES": ",".join(numpys),
            # PyTorch beside it.
            "ATEN_CPU_CAPABILITY": {128: "default", 256: "avx2", 512: "avx512"}[self.vectors],
            "MKL_ENABLE_INSTRUCTIONS": {128: "SSE4_2", 256: "AVX2", 512: "AVX512"}[self.vectors],
        }
        if self.onednn:
            return variables | {"ONEDNN_MAX_CPU_ISA": self.onednn}
        path = [str(FOLDER / "without_onednn"), os.environ.get("PYTHONPATH", "")]
        return variables | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


_AVX2 = "avx2 fma f16c bmi2"
_AVX512 = f"{_AVX2} avx512f avx512dq avx512cd avx512bw avx512vl"
_LATER = ("amx", "avx10", "avx512fp16", "avx512_spr")
_AFTER_SKYLAKE = (
    *("avx512bf16", "avx512bitalg", "avx512ifma", "avx512vb", "avx512vn", "avx512vp", "avxvnni", "avxifma"),
    *("avx512_clx", "avx512_cnl", "avx512_icl", "avx512_kn"),
)
_WIDE = ("avx512", "x86_v4", "vaes", "vpclmul", *_AFTER_SKYLAKE)
PROCESSORS = (
    Processor(
        *("sse4", "sse4_2 popcnt", "Nehalem", "nehalem", "SSE41", 128),
        ("avx", "fma", "f16c", "bmi", "x86_v3", *_WIDE, *_LATER),
    ),
    Processor("avx2-without-onednn", _AVX2, "Haswell", "haswell", "", 256, (*_WIDE, *_LATER)),
    Processor("avx2", _AVX2, "Haswell", "haswell", "AVX2", 256, (*_WIDE, *_LATER)),
    Processor(
        "avx512", _AVX512, "SkylakeX", "skylake-avx512", "AVX512_CORE", 512, (*_AFTER_SKYLAKE, *_LATER)
    ),
    Processor(
        *("avx512-bf16", f"{_AVX512} avx512_bf16", "SkylakeX", "cooperlake", "AVX512_CORE_BF16", 512), _LATER
    ),
    Processor(
        *("amx", f"{_AVX512} avx512_bf16 amx_tile amx_bf16", "SkylakeX", "sapphirerapids"),
        *("AVX512_CORE_AMX", 512, ()),
    ),
)


def machine_flags() -> set[str]:
    """What the kernel says of this machine's processor; nothing on other architectures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def below(flags: set[str]) -> Processor | None:
    """The class with the next shorter vectors than those of a machine with these flags; None below all."""
    here = [each for each in PROCESSORS if each.runs_on(flags)]
    shorter = [each for each in here if each.vectors < max(one.vectors for one in here)]
    return shorter[-1] if shorter else None


def _numpy_features() -> list[str]:
    """NumPy's names of what it would use here beyond its baseline."""
    return [
        name for name in _multiarray_umath.__cpu_dispatch__ if _multiarray_umath.__cpu_features__.get(name)
    ]


def main() -> int:
    """1 if a class failed."""
    parser = ArgumentParser(
        "python -m tests.processors", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("-n", dest="jobs", default="2", help="tests at a time (2)")
    parser.add_argument("--only", type=_classes, default=PROCESSORS, help="classes, with commas between them")
    parser.add_argument(
        "--slice", action="store_true", help="what `make test` runs, in the class that it takes"
    )
    parser.add_argument(
        "--environment", type=_classes, help="print the variables of a class, and run nothing"
    )
    options, others = parser.parse_known_args()
    flags = machine_flags()
    if options.environment:
        print(
            "\n".join("=".join(pair) for each in options.environment for pair in each.environment().items())
        )
        return 0
    wanted = [each for each in (below(flags),) if each is not None] if options.slice else options.only
    if not wanted:
        print("processors: no class has shorter vectors than this machine")
        return 0
    rows = [run(each, flags, options.jobs, SLICE if options.slice else NUMERICAL, others) for each in wanted]
    print("\n" + "\n".join(f"{name:<20} {message}" for name, message, _ in rows))
    return int(any(code for *_, code in rows))


def _classes(names: str) -> list[Processor]:
    """Raises ArgumentTypeError for a name that is none."""
    known = {each.name: each for each in PROCESSORS}
    if unknown := set(names.split(",")) - set(known):
        raise ArgumentTypeError(f"{', '.join(sorted(unknown))}: the classes are {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def run(
    processor: Processor, flags: set[str], jobs: str, tests: tuple[str, ...], others: list[str]
) -> tuple[str, str, int]:
    """(its name, pytest's last line or why there is none, 1 if tests failed)."""
    if not processor.runs_on(flags):
        lacking = " ".join(sorted(set(processor.flags.split()) - flags))
        return processor.name, f"not run: this machine lacks {lacking}", 0
    print(f"\n{processor.name}:", flush=True)
    paths = [] if named(others) else [str(FOLDER / each) for each in tests]
    command = [sys.executable, "-m", "pytest", "-q", *side_by_side(jobs), "-m", f"{BESIDE} and not rest"]
    environment = os.environ | processor.environment()
    process = subprocess.Popen(
        [*command, *paths, *others], env=environment, stdout=subprocess.PIPE, text=True
    )
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    code = process.wait()
    return processor.name, last, int(code not in (0, NOTHING_TO_RUN))


if __name__ == "__main__":
    sys.exit(main())
