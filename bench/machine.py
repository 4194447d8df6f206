"""Makes a machine file for `python -m shardrt simulate` from what this machine does, all of its ranks busy.

    mpirun -n 2 python -m bench.machine --out mine.toml
    python -m shardrt simulate --ranks 2 --machine mine.toml -- models.train

What is measured, on every rank at the same time:
- training steps of small models that are not sharded (MODELS), as they are: each kernel by its name and size,
  with what a step leaves in the caches; and what the host takes between two kernels;
- what those models don't call, of bench.kernels, by itself; narrow products; copies; their products again, of
  bfloat16, where the processor multiplies its bits;
- collectives through the communicators of this node, alone and beside a product.

None of the models is sharded, so nothing that is simulated with the file was measured for it.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import datetime
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device as devices
from shardrt.comm import Communicator, DeviceMesh, init_device_mesh, world
from shardrt.comm.objects import all_gather_object
from shardrt.device import Device
from shardrt.dtypes import bfloat16
from shardrt.simulate.machine import Machine
from shardrt.train.errors import USAGE, one_line

from . import curves
from . import workload as w
from .curves import COPY
from .harness.command_line import Parser
from .harness.environment import facts
from .kernels.case import Maker, Sizes
from .kernels.ops import OPS
from .quiet import DISTURBED, busy_seconds
from .step import mesh_shape
from .training import UNSHARDED, Training
from .watched import Sample, watched

MODELS: tuple[w.Job, ...] = (
    w.Workload(layers=2, dim=320, heads=5, seq=128, batch=4, vocab=1024),
    w.Workload(layers=1, dim=1024, heads=16, seq=256, batch=3, vocab=4096),
    w.Workload(layers=1, dim=512, heads=8, seq=256, batch=2, vocab=32768),
    w.LlamaWorkload(layers=2, dim=512, heads=8, seq=256, batch=4, vocab=12288, kv_heads=4, hidden=1408),
    w.ViTWorkload(layers=1, dim=256, heads=4, hidden=1024, image=96, patch=16, batch=4, classes=100),
)
TINY: tuple[w.Job, ...] = (
    w.Workload(layers=1, dim=32, heads=2, seq=16, batch=2, vocab=64),
    w.LlamaWorkload(layers=1, dim=32, heads=4, seq=16, batch=2, vocab=64, kv_heads=2, hidden=64),
)
# Of bench.kernels: small enough for all to be over in seconds.
_SMALL = Sizes(
    tokens=512,
    width=256,
    heads=4,
    time=128,
    vocab=2048,
    multiplied=256,
    classified=128,
    elements=1 << 18,
    planes=(2, 32),
    side=28,
    attentions={"causal": (2, 4, 4, 128, 64, True), "grouped": (1, 8, 2, 256, 64, True)},
    convolutions={
        "3 x 3": (2, 64, 64, 3, 1, 1, 1, 28),
        "1 x 1": (2, 64, 128, 1, 1, 0, 1, 28),
        "depthwise": (2, 128, 128, 3, 1, 1, 128, 28),
    },
)
OP_SIZES = (
    _SMALL,
    replace(_SMALL, tokens=2048, width=512, heads=8, elements=1 << 21, planes=(4, 128), side=56),
)
_NARROW = (1, 4, 16, 64)
_OTHER_SIDES = 1024  # of narrow products
_COPIES = tuple(1 << place for place in range(16, 27, 2))  # bytes
_CALLS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_CALL_BYTES = tuple(1 << place for place in range(12, 28, 3))  # the whole buffer of a rank
_ROUNDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the file; gives the exit code."""
    with one_line(USAGE):
        options = parse(arguments)
        mesh = init_device_mesh(options.device, mesh_shape("", world.current().size))
    models = Models(TINY if options.tiny else MODELS, mesh)
    for _ in range(1 + options.steps):
        models.turn()
    found = measured(mesh, models, ops=(_SMALL,) if options.tiny else OP_SIZES, tiny=options.tiny)
    if mesh.rank == 0:
        given = " ".join(arguments if arguments is not None else sys.argv[1:])
        command = f"mpirun -n {mesh.size} python -m bench.machine {given}".rstrip()
        options.out.write_text(text_of(found, options.out.stem, facts(command), mesh.size, not options.tiny))
        Machine.load(options.out)  # what is written can be read
        print(f"{options.out}: {mesh.size} ranks, {len(found['device']['kernels'])} kernels", file=sys.stderr)
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Raises ValueError."""
    parser = Parser(prog="python -m bench.machine", description="Calibrates a machine file.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the TOML file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    parser.add_argument(
        "--steps", type=w.positive, default=3, metavar="N", help="timed steps of each model (3)"
    )
    parser.add_argument("--tiny", action="store_true", help="sizes for a try: the figures mean nothing")
    options = parser.parse_args(arguments)
    if options.out.suffix != ".toml":
        raise ValueError(f"--out: the name must end in .toml, got {options.out}")
    return options


def measured(
    mesh: DeviceMesh, models: "Models", *, ops: Sequence[Sizes] = (), tiny: bool = False
) -> dict[str, Any]:
    """The tables of a machine file. Collective; all ranks give the same.

    models: that have made their turns. ops: sizes of bench.kernels' passes, for kernels that they don't call.
    """
    here, control = devices.current(), mesh.communicator("control")
    samples, launch = models.slowest(control)
    known = {sample.name for sample in samples}
    others = [s for s in of_ops(ops) if s.name not in known]
    others += of_narrow_products(here, 128 if tiny else _OTHER_SIDES)
    others += of_bits(here, samples)
    others += of_copies(here, _COPIES[:2] if tiny else _COPIES)
    item = of_issuing(here)
    calls, base = of_collectives(here, control, _CALL_BYTES[:3] if tiny else _CALL_BYTES)
    part = contention(here, mesh, 1 << (16 if tiny else 24))
    every = all_gather_object(control, [[astuple(s) for s in others], item, calls, base, part])
    samples += [sample_of(s) for each in every for s in each[0]]
    item, base, part = (statistics.fmean(each[place] for each in every) for place in (1, 3, 4))
    rows = {
        call: [
            (sent, statistics.fmean(each[2][call][place][1] for each in every))
            for place, (sent, _) in enumerate(own)
        ]
        for call, own in calls.items()
    }
    by_call = curves.calls_of(rows, base)
    widest = max((rate for row in by_call.values() for _, rate in row), default=1e9)
    found = {
        "device": curves.device_of(samples) | {"whole": here.in_host_memory},
        "host": {"item": round(item, 8), "launch": round(launch, 8)},
        "node": {"latency": 0.0, "bandwidth": widest},
        "network": {"latency": 0.0, "bandwidth": widest},
        "collectives": {"base": round(base, 8), "processor": round(part, 3), "memory": 0.0, "calls": by_call},
    }
    if here.in_host_memory:
        return {"host_streams": ["compute"], **found}
    return found | {"host_processor": host_processor(), "host_link": host_link(here)}


def sample_of(row: list[Any]) -> Sample:
    """What was told as JSON."""
    return Sample(*row[:3], tuple(row[3]), *row[4:])


# -- what is measured


class Models:
    """Training steps that are not sharded, a turn one of each model; of the first turn nothing is kept."""

    def __init__(self, models: Iterable[w.Job], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._trainings = [Training(job, mesh, UNSHARDED) for job in models]
        # By model, of each step: samples, launches, seconds of the host; processor time of all, of its own.
        self._steps: list[list[tuple[list[Sample], int, float, float, float]]] = [[] for _ in self._trainings]
        self._turns = 0

    def turn(self) -> None:
        """A step of each, all ranks at the same time. Collective."""
        here = devices.current()
        for training, steps in zip(self._trainings, self._steps, strict=True):
            batch = training.batch(self._turns)
            meet(self._mesh)
            busy, own = busy_seconds(), time.process_time()
            with watched(here) as watch:
                stamps = training.step(*batch)
            busy, own = busy_seconds() - busy, time.process_time() - own
            if here.in_host_memory:  # the host computes itself: what is not of a kernel is its own
                host = stamps.seconds - watch.spent - sum(s.seconds for s in watch.samples)
            else:  # until it waits for the loss it only issues
                host = stamps.optimizer - stamps.begin - watch.spent
            if self._turns:
                steps.append((watch.samples, watch.launches, host, busy, own))
        self._turns += 1

    def slowest(self, control: Communicator) -> tuple[list[Sample], float]:
        """Samples, and seconds of the host for each launch: of each step those of its slowest rank.

        Collective. Ranks of a sharded model wait for each other, so that they go at the pace of the slowest.
        Steps that other processes disturbed count only if all of their model were.
        """
        samples, launches, host = [], 0, 0.0
        for own in self._steps:
            mine = [([astuple(s) for s in of_step], *rest) for of_step, *rest in own]
            steps = list(zip(*all_gather_object(control, mine), strict=True))
            for step in [each for each in steps if _others(each) <= DISTURBED] or steps:
                rows, count, seconds, *_ = max(step, key=_seconds_of)
                samples += map(sample_of, rows)
                launches, host = launches + count, host + seconds
        return samples, max(0.0, host / launches)


def _seconds_of(step: Sequence[Any]) -> float:
    """Of a rank's step, as Models keeps it: its kernels and its host."""
    return step[2] + sum(row[-1] for row in step[0])


def _others(step: Sequence[Sequence[Any]]) -> float:
    """Cores that processes other than these ranks used in a step."""
    *_, busy, own = zip(*step, strict=True)
    return (max(busy) - sum(own)) / max(map(_seconds_of, step))


def of_ops(sizes: Iterable[Sizes]) -> list[Sample]:
    """Each pass of bench.kernels, alone. The first call compiles: curves.undisturbed leaves it out."""
    here, samples = devices.current(), []
    for each in sizes:
        with watched(here) as watch:  # the passes take their kernels when they are made
            for op in OPS.values():
                for case in op(Maker(each, "float32")):
                    for _ in range(1 + _ROUNDS):
                        case.ours()
        samples += watch.samples
    return samples


def of_issuing(here: Device) -> float:
    """Seconds that the host takes to give something to another stream."""
    stream, event, times = here.new_stream("issuing"), here.new_event(), 200
    start = time.perf_counter()
    for _ in range(times):
        stream.submit(int)
        stream.record(event)
        stream.wait(event)
    seconds = time.perf_counter() - start
    stream.synchronize()
    return seconds / (3 * times)


def of_narrow_products(here: Device, side: int) -> list[Sample]:
    """Products of which one size is small: rows, columns, or what is summed over."""
    samples, linear = [], here.kernels.linear
    for small in _NARROW:
        for rows, inputs, outputs in (small, side, side), (side, small, side), (side, side, small):
            arrays = [
                here.asarray(np.ones(shape, np.float32)) for shape in ((rows, inputs), (outputs, inputs))
            ]
            y = here.empty((rows, outputs), np.float32)
            linear.forward(*arrays, None, y)
            with watched(here) as watch:
                for _ in range(_ROUNDS):
                    here.kernels.linear.forward(*arrays, None, y)
            samples += watch.samples
    return samples


def of_bits(here: Device, samples: Iterable[Sample]) -> list[Sample]:
    """Wide products and attentions of these samples again, of bfloat16, where a CPU computes it from bits."""
    if here.gathered_dtype(bfloat16) != np.uint16:
        return []
    found = []
    for name, sizes in sorted({(s.name, s.sizes) for s in samples}):
        for module, function, arguments, how in _in_bits(name, sizes):
            with watched(here) as watch:
                for _ in range(1 + _ROUNDS):
                    getattr(getattr(here.kernels, module), function)(*arguments, **how)
            found += watch.samples[1:]  # the first makes it ready
    return found


def _in_bits(name: str, sizes: tuple[int, ...]) -> Iterator[tuple[str, str, tuple, dict]]:
    """(module, function, arguments, named arguments) of a wide product or an attention of such sizes."""
    module, _, function = name.partition(".")
    if module == "linear" and len(sizes) == 3 and min(sizes) >= curves.WIDE:
        m, n, k = sizes
        function = function.replace("parameters", "weight")  # with a bias: its sum is a kernel of its own
        if function in ("forward", "forward_gelu"):
            results = [_sums(m, n) for _ in range(1 + (function == "forward_gelu"))]
            yield module, function, (_ones(m, k), _ones(n, k), None, *results), {}
        elif function == "backward_input":
            yield module, function, (_ones(m, k), _ones(k, n), _sums(m, n)), {}
        elif function == "backward_weight":
            yield module, function, (_ones(k, n), _ones(k, m), _sums(m, n), False), {}
    elif name in ("attention.forward", "attention.backward"):
        batch, heads, queries, keys, width = sizes
        packed = [(batch, time, heads, width) for time in (queries, keys, keys)]  # of one linear layer
        q, k, v = (_ones(*shape).swapaxes(1, 2) for shape in packed)
        y, dy, dq, dk, dv = (_sums(*packed[place]).swapaxes(1, 2) for place in (0, 0, 0, 1, 2))
        lse, how = _sums(batch, heads, queries), {"causal": queries == keys, "scale": width**-0.5}
        forward = q, k, v, y, lse
        yield module, function, forward if function == "forward" else (dy, *forward, dq, dk, dv), how


def _ones(*shape: int) -> np.ndarray:
    """In bfloat16, as bits."""
    return np.full(shape, 0x3F80, np.uint16)


def _sums(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def of_copies(here: Device, sizes: Iterable[int]) -> list[Sample]:
    """On the device; the arrays of one size one after the other, so that caches don't have them all."""
    samples = []
    for nbytes in sizes:
        pairs = [[here.empty(nbytes // 4, np.float32) for _ in range(2)] for _ in range(4)]
        for target, source in pairs:
            source.fill(1)
            target.fill(0)
        for _ in range(_ROUNDS):
            for target, source in pairs:
                seconds = _seconds(here, partial(here.copy, target, source))
                samples.append(Sample(COPY, 0, 2 * nbytes, (), "float32", seconds))
    return samples


def of_collectives(
    here: Device, communicator: Communicator, sizes: Iterable[int]
) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """By call, (bytes that a rank sends, seconds), and the seconds of a barrier. Medians. Collective."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    ranks, stream = communicator.size, here.current_stream
    barrier = partial(communicator.barrier, stream=stream)
    base = statistics.median(_seconds(here, barrier) for _ in range(20 * _ROUNDS))
    if ranks == 1:
        return {}, base
    for nbytes in sizes:
        count = nbytes // 4 // ranks * ranks
        buffer, other = (communicator.allocate(count, np.float32, shared=False) for _ in range(2))
        own = other[: count // ranks]
        works = {
            "all_gather": partial(communicator.all_gather, buffer, stream=stream),
            "reduce_scatter": partial(communicator.reduce_scatter, own, buffer, stream=stream),
            "all_reduce": partial(communicator.all_reduce, buffer, stream=stream),
            "all_to_all": partial(communicator.all_to_all, other, buffer, stream=stream),
        }
        for call in _CALLS:
            works[call]()
            seconds = []
            for _ in range(_ROUNDS):
                barrier()
                seconds.append(_seconds(here, works[call]))
            sent = count * 4 * (ranks - 1) / ranks * (2 if call == "all_reduce" else 1)
            found[call].append((sent, statistics.median(seconds)))
    return dict(found), base


def contention(here: Device, mesh: DeviceMesh, nbytes: int) -> float:
    """Which part of the processor a reduce-scatter in a stream of its own keeps. Collective."""
    communicator, stream = mesh.communicator("contention"), here.new_stream("contention")
    if communicator.size == 1:
        return 0.0
    count = nbytes // 4 // communicator.size * communicator.size
    buffer = communicator.allocate(count, np.float32, shared=False)
    own = here.empty(count // communicator.size, np.float32)
    a, b = (here.asarray(np.ones((384, 384), np.float32)) for _ in range(2))
    y, times = here.empty((384, 384), np.float32), max(1, nbytes >> 22)

    def product() -> None:
        for _ in range(times):
            here.kernels.matmul.matmul(a, b, y)

    def move() -> None:
        for _ in range(times):
            communicator.reduce_scatter(own, buffer, stream=stream)
        stream.synchronize()

    def both() -> None:
        for _ in range(times):
            communicator.reduce_scatter(own, buffer, stream=stream)
        product()
        stream.synchronize()

    seconds = []
    for work in product, move, both:
        work()
        tried = []
        for _ in range(_ROUNDS):
            meet(mesh)
            tried.append(_seconds(here, work))
        seconds.append(statistics.median(tried))
    return curves.share(*seconds)


def host_processor() -> dict[str, float]:
    """Of a machine whose kernels run elsewhere: the host's product and copy by NumPy."""
    a = np.ones((1024, 1024), np.float32)
    source, target = (np.ones(1 << 24, np.float32) for _ in range(2))
    host = devices.get("cpu")
    product = min(_seconds(host, partial(np.matmul, a, a)) for _ in range(_ROUNDS))
    copied = min(_seconds(host, partial(np.copyto, target, source)) for _ in range(_ROUNDS))
    return {"flops": round(2 * 1024**3 / product), "bandwidth": round(2 * source.nbytes / copied)}


def host_link(here: Device) -> dict[str, float]:
    """Between host and device: a small copy and a large one."""
    found = []
    for count in 1 << 10, 1 << 25:
        pinned, array = here.pinned(count, np.float32), here.empty(count, np.float32)
        copying = partial(here.copy, array, pinned)
        found.append((4 * count, min(_seconds(here, copying) for _ in range(_ROUNDS))))
    (little, short), (much, long) = found
    bandwidth = (much - little) / (long - short)
    return {"latency": max(0.0, short - little / bandwidth), "bandwidth": round(bandwidth)}


def _seconds(here: Device, work: Any) -> float:
    here.current_stream.synchronize()
    start = time.perf_counter()
    work()
    here.current_stream.synchronize()
    return time.perf_counter() - start


def meet(mesh: DeviceMesh) -> None:
    """All ranks go on together. Collective."""
    stream = devices.current().current_stream
    mesh.communicator("control").barrier(stream=stream)
    stream.synchronize()


# -- the file


def text_of(found: dict[str, Any], name: str, about: dict[str, str], ranks: int, really: bool = True) -> str:
    """The TOML file of what was measured, `really` or for a try."""
    network = "the network's figures are the node's: no other node was there"
    each = f"{ranks} ranks of one thread"
    origin = "; ".join((about["command"], about["processor"], each, about["versions"], network))
    lines = [
        f"# {about['processor']}: {each}, all busy. Made by the command in `origin`.",
        f"name = {json.dumps(name)}",
        f"origin = {json.dumps(origin)}",
        f"date = {datetime.date.fromisoformat(about['date'])}",
        f"measured = {json.dumps(really)}",
        f"ranks_per_node = {ranks}",
    ]
    tables = []
    for key, value in found.items():
        if not isinstance(value, dict):
            lines.append(f"{key} = {json.dumps(value)}")
            continue
        tables += ["", f"[{key}]"]
        tables += [f"{each} = {_value(value[each])}" for each in value if each not in ("kernels", "calls")]
        for call, curve in value.get("calls", {}).items():
            tables.append(f"calls.{call} = {json.dumps(curve)}")
        for kernel in value.get("kernels", ()):
            tables += ["", f"[[{key}.kernels]]"]
            tables += [f"{each} = {json.dumps(value)}" for each, value in kernel.items()]
    return "\n".join([*lines, *tables]) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {json.dumps(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
