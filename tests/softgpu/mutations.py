"""Which waits, records and releases would be missed: each is removed in turn, and training must show it.

    python -m tests.softgpu.mutations [--only TEXT] [--json FILE]

A mutation is found if in some mode of the software GPU some variant gives other bits, NaN, or an error. What
is not found is printed with its line: another wait covers it, or nothing needs it.
"""

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (
    "shardrt/fsdp/gathers.py",
    "shardrt/fsdp/gradients.py",
    "shardrt/fsdp/collectives.py",
    "shardrt/optim/offload.py",
    "shardrt/activation_offload.py",
    "shardrt/comm/staged.py",
    "shardrt/comm/nccl.py",
)
CALLS = ("wait", "record", "synchronize", "wait_here")
MODES = ("side first", "compute first", "late")
LAYERS = 3  # slots are used again
# (variant, ranks, communicator), the cheapest that reach all of the files.
RUNS = [
    ("float32", 1, "auto"),
    ("bfloat16", 2, "nccl"),
    ("all on the host", 2, "nccl"),
    ("activations on the host", 1, "auto"),
    ("updates on the host", 1, "auto"),
    ("updates in backward, on the host", 2, "staged"),
    ("bfloat16 on the wire, on the host", 2, "nccl"),
    ("accumulation", 2, "staged"),
    ("recomputation", 2, "nccl"),
    ("frozen late", 2, "nccl"),
    ("accumulation on the host", 2, "nccl"),
]


def sites(path: str) -> list[tuple[int, str]]:
    """(line, source) of every statement that only waits or records."""
    source = (ROOT / path).read_text()
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value.func
            if isinstance(call, ast.Attribute) and call.attr in CALLS:
                found.append((node.lineno, ast.unparse(node)))
    return sorted(found)


class Without(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module without the statement in one line."""

    def __init__(self, path: str, line: int) -> None:
        self._name = path.removesuffix(".py").replace("/", ".")
        self._path, self._line = ROOT / path, line

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        tree = ast.parse(self._path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and node.lineno == self._line:
                node.value = ast.copy_location(ast.Constant(None), node.value)
        exec(compile(tree, str(self._path), "exec"), module.__dict__)


def run(mode: str, seed: int, variant: str, ranks: int, communicator: str) -> str:
    """A digest of what training gives: hash of losses, norms and weights."""
    import hashlib

    import numpy as np

    from shardrt.comm import thread
    from shardrt.device.arena import Arena
    from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
    from tests.cuda import test_training as training

    settings = training.VARIANTS | {
        "bfloat16 on the wire, on the host": {
            "mp_policy": MixedPrecisionPolicy("bfloat16", "bfloat16"),
            "offload_policy": CPUOffloadPolicy(),
        },
        "accumulation on the host": {"offload_policy": CPUOffloadPolicy(), "parts": 2},
    }
    CUDA.choose(mode, seed)
    # Slots that are given back hold NaN; with one rank they are the shards.
    Arena.poison = property(lambda arena: ranks > 1, lambda arena, value: None)
    how = {"communicator": communicator, "layers": LAYERS, **settings[variant]}
    found = thread.run(ranks, training.train, "cuda", **how)
    if not all(np.isfinite(seen).all() for seen, _ in found):
        return "nan"
    digest = hashlib.sha256()
    for seen, weights in found:
        digest.update(repr(seen).encode())
        for name in sorted(weights or {}):
            digest.update(weights[name].tobytes())
    return digest.hexdigest()[:16]


def child(path: str, line: int, expected: dict) -> None:
    """Print how the mutation is found first, "" if it is not."""
    for key, digest in expected.items():
        variant, ranks, communicator = json.loads(key)
        for mode in MODES:
            try:
                found = run(mode, 1, variant, ranks, communicator)
            except BaseException as error:
                print(f"{type(error).__name__}: {str(error)[:60]} ({variant}, {mode})")
                return
            if found != digest:
                print(f"{'NaN' if found == 'nan' else 'other bits'} ({variant}, {mode})")
                return
    print("")


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.softgpu.mutations")
    parser.add_argument("--only", default="", help="files or statements with this text in them")
    parser.add_argument("--json", type=Path, help="a file for what was found")
    parser.add_argument("-n", dest="jobs", type=int, default=2, help="at a time (2)")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        path, line, expected = options.child
        if path:
            sys.meta_path.insert(0, Without(path, int(line)))
    global CUDA
    from tests.softgpu import cuda
    from tests.softgpu.start import start

    warnings.simplefilter("ignore")
    if options.child:
        cuda.PATIENCE = 15.0
        CUDA = start()
        if path:
            child(path, int(line), json.loads(expected))
        else:
            expected = {json.dumps(each): run("at once", 0, *each) for each in RUNS}
            assert "nan" not in expected.values()
            print(json.dumps(expected))
        sys.stdout.flush()
        os._exit(0)
    expected = _child("", 0, "")
    json.loads(expected)  # else it is no answer
    every = [(path, *site) for path in FILES for site in sites(path)]
    wanted = [site for site in every if options.only in "{}:{} {}".format(*site)]
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:  # of processes
        told = pool.map(lambda site: _child(*site[:2], expected), wanted)
        for (path, line, source), how in zip(wanted, told, strict=True):
            results.append({"file": path, "line": line, "statement": source, "found": how})
            print(f"{path}:{line}  {source}\n    {how or 'NOT FOUND'}", flush=True)
    missed = [result for result in results if not result["found"]]
    print(f"{len(results)} removed, {len(results) - len(missed)} found")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def _child(path: str, line: int, expected: str) -> str:
    command = [sys.executable, "-m", "tests.softgpu.mutations", "--child", path, str(line), expected]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


if __name__ == "__main__":
    main()
