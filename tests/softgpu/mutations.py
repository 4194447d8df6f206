"""Which waits, records and releases would be missed: each is changed in turn, and training must show it.

    python -m tests.softgpu.mutations [--how move] [--only TEXT] [--json FILE]

A wait, a record, a synchronisation or a release is removed; a wait, a record, work and a collective are moved
to another stream. That is found if in some mode of the software GPU some variant that comes there gives other
bits, NaN, an error or a deadlock. What is not found is printed with its line: another wait covers it, nothing
needs it, or no variant comes there.
"""

import argparse
import ast
import hashlib
import importlib
import inspect
import json
import multiprocessing
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from shardrt import device
from shardrt.activation_offload import offload_activations
from shardrt.comm import thread
from shardrt.device.arena import Arena
from shardrt.device.cuda import CUDAStream
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.cuda import small_gpt as training
from tests.softgpu import programs, scheduler
from tests.softgpu.start import start

ROOT = Path(__file__).parents[2]
FILES = (
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "shardrt/fsdp").rglob("*.py")),
    *("shardrt/nn/storage.py", "shardrt/optim/offload.py", "shardrt/activation_offload.py"),
    *("shardrt/comm/staged.py", "shardrt/comm/nccl.py", "shardrt/comm/ipc.py"),
    *("shardrt/functional/collective.py", "shardrt/functional/waits.py"),
)
CALLS = {
    "remove": (
        *("wait", "record", "synchronize", "wait_here", "barrier", "_barrier"),
        *("release", "give_back", "wait"),
    ),
    "move": ("wait", "record", "submit"),
}
MODES = ("side first", "compute first", "late")
PATIENCE = 900  # seconds for all variants of one mutation
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
    ("updates in backward", 2, "nccl"),
    ("accumulation, whole on each", 2, "nccl"),
    ("bfloat16 on the wire", 2, "ipc"),
    ("frozen late", 2, "ipc"),
    ("hybrid", 4, "nccl"),
    ("a tree", 2, "nccl"),
    ("whole for a while", 2, "nccl"),
    ("a backward that raises", 2, "nccl"),
    ("a backward that raises, on the host", 2, "nccl"),
    ("a backward that raises, whole on each", 2, "nccl"),
    ("a backward that raises, activations on the host", 1, "auto"),
    ("files", 1, "auto"),
    ("state on the host", 2, "nccl"),
    ("frozen late, updates in backward", 2, "nccl"),
    ("a unit that some ranks leave out", 2, "nccl"),
    ("unfrozen while gradients are accumulated", 2, "nccl"),
    ("cut along tp", 4, "nccl"),
    ("cut along tp, sequence", 4, "nccl"),
]
VARIANTS = training.VARIANTS | {
    "bfloat16 on the wire, on the host": {
        "mp_policy": MixedPrecisionPolicy("bfloat16", "bfloat16"),
        "offload_policy": CPUOffloadPolicy(),
    },
    "accumulation on the host": {"offload_policy": CPUOffloadPolicy(), "parts": 2},
    "accumulation, whole on each": {"strategy": "NO_SHARD", "parts": 2},
    "hybrid": {"strategy": "HYBRID_SHARD", "shape": (2, 2)},
    "a tree": {"program": programs.tree, "reduction": "tree"},
    "whole for a while": {"program": programs.whole_for_a_while},
    "a backward that raises": {"program": programs.raises, "in_backward": True},
    "a backward that raises, on the host": {
        "program": programs.raises,
        "offload_policy": CPUOffloadPolicy(),
    },
    "a backward that raises, activations on the host": {
        "program": programs.raises,
        "prepare": offload_activations,
    },
    "a backward that raises, whole on each": {"program": programs.raises, "strategy": "NO_SHARD"},
    "state on the host": {"offload_policy": CPUOffloadPolicy(False, False, True)},
    "frozen late, updates in backward": {"freeze": True, "in_backward": True},
    "a unit that some ranks leave out": {"program": programs.differs},
    "unfrozen while gradients are accumulated": {"program": programs.unfrozen},
    "cut along tp": {"tp": True, "shape": (2, 2)},
    "cut along tp, sequence": {"tp": True, "shape": (2, 2), "sequence": True},
    "files": {"offload_policy": CPUOffloadPolicy(directory=tempfile.gettempdir())},
}
_here = threading.local()
_reached: set[str] = set()


def sites(path: str, how: str) -> list[tuple[str, int, str, str]]:
    """(path, line, source, how) of every statement that can be changed so."""
    found = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            named = isinstance(call.func, ast.Attribute) and call.func.attr in CALLS[how]
            if named or how == "move" and _keyword(call):
                found.append((path, node.lineno, ast.unparse(node), how))
    return sorted(found)


def _keyword(call: ast.Call) -> ast.keyword | None:
    """That which says in what stream a collective is."""
    return next((keyword for keyword in call.keywords if keyword.arg == "stream"), None)


def change(path: str, edit) -> None:
    """Give functions of a module the code that they have when `edit` has changed each of its statements."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            edit(node)
    other = dict(module.__dict__)
    exec(compile(ast.fix_missing_locations(tree), str(ROOT / path), "exec"), other)
    module.__dict__.update(_reach=_reach, _elsewhere=_elsewhere)
    _take_over(module.__dict__, other, module.__name__)


def _take_over(old: dict, new: dict, module: str) -> None:
    for name, value in new.items():
        before = inspect.unwrap(old[name]) if callable(old.get(name)) else old.get(name)
        if isinstance(value, classmethod | staticmethod | property):
            value, before = [getattr(x, "fget", None) or x.__func__ for x in (value, before)]
        value = inspect.unwrap(value) if callable(value) else value
        if getattr(value, "__module__", None) != module or value is before:
            continue
        if (
            getattr(value, "__name__", name) != name
        ):  # a second name, which an option may take over
            continue
        if inspect.isfunction(value):
            before.__code__ = value.__code__
        elif inspect.isclass(value):
            _take_over(vars(before), vars(value), module)


def _reach(site: str) -> None:
    _reached.add(site)


def _elsewhere(site: str, stream):
    """Another stream: the compute stream, or for that one a stream that nothing else uses."""
    if not isinstance(stream, CUDAStream):
        return stream  # of the host
    _reach(site)
    compute = device.current().current_stream
    if stream is not compute:
        return compute
    if not hasattr(_here, "side"):
        _here.side = device.current().new_stream("elsewhere")
    return _here.side


def mutation(site: tuple, node: ast.Expr) -> None:
    """Change a statement if it is that of the site."""
    path, line, source, how = site
    if node.lineno != line or ast.unparse(node) != source:
        return
    if how == "remove":
        node.value = ast.Constant(None)
        return
    call, keyword = node.value, _keyword(node.value)
    place = keyword if keyword else call.func
    place.value = ast.Call(ast.Name("_elsewhere", ast.Load()), [ast.Constant(_name(site)), place.value], [])


def _name(site: tuple) -> str:
    return "{}:{} {}".format(*site)


def watch(path: str, names: set[str], node: ast.Expr) -> None:
    """Note when a statement is reached."""
    name = _name((path, node.lineno, ast.unparse(node)))
    if name in names:
        noted = ast.Call(ast.Name("_reach", ast.Load()), [ast.Constant(name)], [])
        node.value = ast.BoolOp(ast.Or(), [noted, node.value])


def run(mode: str, variant: str, ranks: int, communicator: str) -> str:
    """A digest of what training gives: hash of losses, norms and weights."""
    CUDA.choose(mode, 1)
    how = {"communicator": communicator, "layers": LAYERS, **VARIANTS[variant]}
    # Slots that are given back hold NaN, but where they are the shards.
    poison = ranks > 1 and how.get("strategy") != "NO_SHARD"
    Arena.poison = property(lambda arena: poison, lambda arena, value: None)
    found = thread.run(ranks, how.pop("program", training.train), "cuda", **how)
    if not all(np.isfinite(seen).all() for seen, _ in found):
        return "nan"
    digest = hashlib.sha256()
    for seen, weights in found:
        digest.update(repr(seen).encode())
        for name in sorted(weights or {}):
            digest.update(weights[name].tobytes())
    return digest.hexdigest()[:16]


def unmutated(every: list[tuple]) -> list[tuple]:
    """(how it is run, its digest, which sites it reaches). Raises where modes differ."""
    for path in FILES:
        change(path, partial(watch, path, {_name(site) for site in every if site[0] == path}))
    expected = []
    for each in RUNS:
        _reached.clear()
        digest = run("at once", *each)
        found = {mode: run(mode, *each) for mode in MODES}
        assert set(found.values()) == {digest} != {"nan"}, f"{each} without a mutation: {digest}, {found}"
        expected.append((each, digest, sorted(_reached)))
    return expected


def mutated(site: tuple, expected: list[tuple]) -> str:
    """How it is found first; "" if it is not."""
    change(site[0], partial(mutation, site))
    _reached.clear()
    reaching = [pair for *pair, reached in expected if _name(site) in reached]
    for each, digest in reaching:
        for mode in MODES:
            where = f"({each[0]}, {mode})"
            try:
                found = run(mode, *each)
            except BaseException as error:
                kind = "deadlock" if "nobody" in str(error) else type(error).__name__
                return f"{kind}: {str(error)[:60]} {where}"
            if found != digest:
                return f"{'NaN' if found == 'nan' else 'other bits'} {where}"
    if not reaching or site[3] == "move" and not _reached:
        return "-"
    return ""


def _answer(connection, function, *args) -> None:
    scheduler.PATIENCE = 15.0
    warnings.simplefilter("ignore")
    connection.send(function(*args))


def asked(questions: list[tuple], jobs: int):
    """(question, answer) of each, (function, *args), as it comes from a process of its own; None: no end."""
    forks, running, left = multiprocessing.get_context("fork"), {}, list(questions)
    while left or running:
        while left and len(running) < jobs:
            here, there = forks.Pipe(duplex=False)
            question = left.pop(0)
            process = forks.Process(target=_answer, args=(there, *question), daemon=True)
            process.start()
            there.close()
            running[here] = process, question, time.monotonic()
        ready = wait(list(running), 1.0)
        for here, (process, question, began) in list(running.items()):
            if here in ready:
                try:
                    yield question, here.recv()
                except EOFError:
                    process.join()
                    yield question, f"crash: exit code {process.exitcode}"
            elif time.monotonic() - began > PATIENCE:
                yield question, "deadlock: no end"
            else:
                continue
            process.kill()
            process.join()
            del running[here]


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.softgpu.mutations")
    parser.add_argument("--how", choices=sorted(CALLS), help="only these mutations")
    parser.add_argument("--only", default="", help="files or statements with this text in them")
    parser.add_argument("--json", type=Path, help="a file for what was found")
    parser.add_argument("-n", dest="jobs", type=int, default=2, help="at a time (2)")
    options = parser.parse_args()
    global CUDA
    CUDA = start()
    hows = [options.how] if options.how else list(CALLS)
    every = [site for how in hows for path in FILES for site in sites(path, how)]
    wanted = [site for site in every if options.only in _name(site)]
    [(_, expected)] = asked([(unmutated, wanted)], 1)
    if isinstance(expected, str):
        sys.exit(f"without a mutation: {expected}")
    rows = []
    for (_, site, _), found in asked([(mutated, site, expected) for site in wanted], options.jobs):
        path, line, source, how = site
        kind = {"": "not found", "-": "not reached"}.get(found, found.split("(")[0].split(":")[0].strip())
        rows.append(
            {"file": path, "line": line, "statement": source, "how": how, "kind": kind, "found": found}
        )
        print(f"{how} {path}:{line}  {source}\n    {found or 'NOT FOUND'}", flush=True)
        if options.json:  # what has been found so far
            rows.sort(key=lambda row: (row["how"], row["file"], row["line"]))
            options.json.write_text(json.dumps(rows, indent=1))
    print(dict(Counter(row["kind"] for row in rows)))


if __name__ == "__main__":
    main()
