"""Times shardrt's training step, forward, loss, backward and AdamW, and says where the time went.

The last line is one JSON object. Strategies that are measured together have processes of their own, for
their memory is theirs.

    mpirun -n 2 python -m bench.step --size gpt2
    python -m bench.step --ranks 2 --size gpt2 --strategy all
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import os
import statistics
import sys
import time
from math import prod

import numpy as np
from threadpoolctl import threadpool_info

import shardrt.checkpoint
from shardrt import device
from shardrt.comm import init_device_mesh, mpi_world, world
from shardrt.comm.objects import all_gather_object
from shardrt.device import timeline
from shardrt.fsdp import ShardingStrategy
from shardrt.kernels import onednn
from shardrt.train.errors import DATA, USAGE, one_line

from . import figures as f
from . import ranks
from . import workload as w
from .harness.command_line import Parser
from .parts import COMPUTE, EXPOSED, PARTS, STREAMS, busy, parts
from .traffic import Counter, expected, expected_of_stage, expected_of_tensor
from .training import LOW, PIPELINE, TENSOR, UNSHARDED, Training

STRATEGIES = tuple(strategy.name for strategy in ShardingStrategy)
SIDE = w.SIDE


def arguments() -> argparse.ArgumentParser:
    """The options of python -m bench.step."""
    parser = Parser(prog="python -m bench.step", description="Times shardrt's training step.")
    w.add_arguments(parser)
    parser.add_argument("--device", type=w.cpu, default="cpu", help="cpu; on a GPU: python -m bench.gpu")
    parser.add_argument(
        "--strategy",
        choices=[*STRATEGIES, *(name + LOW for name in STRATEGIES), *TENSOR, *PIPELINE, UNSHARDED, "all"],
        default="FULL_SHARD",
        help="NONE: not sharded at all; every rank then trains a model of its own. TP: modules cut over all "
        "ranks, which train on the batches of all; TP_SP: the sequence as well. PP_1F1B, PP_ZB-H1 ..: stages "
        "on all ranks, and all batches in micro-batches. FULL_SHARD-bf16 ..: parameters in bfloat16",
    )
    parser.add_argument("--ranks", type=w.positive, metavar="N", help="start so many, where mpirun does not")
    parser.add_argument("--prefetch", type=w.natural, default=1, metavar="N", help="units gathered ahead (1)")
    parser.add_argument("--communicator", default="auto", metavar="NAME", help="shm, mpi, ... (auto)")
    parser.add_argument(
        "--loss-chunk", type=w.natural, default=0, metavar="ROWS", help="of logits at a time (all)"
    )
    parser.add_argument("--recompute", action="store_true", help="each block's activations, in backward")
    parser.add_argument("--save", metavar="DIR", help="write the initial weights to DIR and do not train")
    return parser


def main() -> None:
    """Time training steps and print the figures of each rank."""
    with one_line(USAGE):
        options = arguments().parse_args()
        workload = w.workload_of(options)
        launched = mpi_world.launch()
        check(options, launched and launched.size)
    if launched is None and (options.ranks or options.strategy == "all"):
        with one_line(USAGE, kinds=(RuntimeError,)):
            start(options)
        return
    with one_line(USAGE):
        counter = Counter()
        shape = mesh_shape(options.strategy, world.current().size)
        mesh = init_device_mesh("cpu", shape, communicator=options.communicator, wrap=counter)
        names = ("prefetch", "clip", "loss_chunk", "micro_batches", "recompute")
        how = {name: getattr(options, name) for name in names}
        training = Training(workload, mesh, options.strategy, **how)
    with one_line(DATA, mesh):
        if options.weights:
            shardrt.checkpoint.load(options.weights, training.model)
    if options.save:
        shardrt.checkpoint.save(options.save, training.model)
    else:
        run(options, training, counter)


def check(options: argparse.Namespace, launched: int | None) -> None:
    """Raise ValueError for options that don't fit together. launched: ranks of mpirun, None without it."""
    if launched is not None and options.ranks not in (None, launched):
        raise ValueError(f"--ranks {options.ranks}, but mpirun has started {launched}")
    if launched is not None and options.strategy == "all":
        raise ValueError(
            "--strategy all starts processes for each strategy, so it is not for mpirun: "
            f"python -m bench.step --ranks {launched} --strategy all"
        )
    if options.output is not None and options.output.is_file():
        raise ValueError(f"--output: {options.output} exists")
    if options.strategy == "all" and (options.save or options.weights):
        raise ValueError("--strategy all begins with the seed's weights: no --save, no --weights")


def mesh_shape(strategy: str, size: int) -> tuple[int, ...]:
    """One axis of all ranks; for a hybrid two copies. Raises ValueError where they don't come out even."""
    if not strategy.startswith("HYBRID"):
        return (size,)
    if size % 2:
        raise ValueError(f"{strategy} makes 2 copies here, which needs an even number of ranks, got {size}")
    return 2, size // 2


def start(options: argparse.Namespace) -> None:
    """The ranks of each strategy, and what rank 0 printed; of several strategies a table."""
    count = options.ranks or 1
    if options.strategy != "all":
        print(ranks.mpirun(["-m", "bench.step", *sys.argv[1:]], count), end="")
        return
    given = sys.argv[1:]
    chosen = [name for name in STRATEGIES if count % 2 == 0 or not name.startswith("HYBRID")]
    own = ["--output", os.devnull]  # the file is for all of them together
    results = [ranks.step([*given, "--strategy", name, *own], count) for name in (*chosen, UNSHARDED)]
    f.show({"strategies": results}, table(results), options)


def run(options: argparse.Namespace, training: Training, counter: Counter) -> None:
    """This rank's steps. Collective; rank 0 prints the figures."""
    mesh, workload = training.mesh, training.workload
    control = mesh.communicator("control")
    all_gather_object(control, None)  # all ranks multiply at the same time, as in a step
    product = statistics.fmean(all_gather_object(control, product_gflops(options.strategy.endswith(LOW))))
    for number in range(options.warmup):
        training.step(*training.batch(number))
    before, used, steps = counter.bytes, 0.0, []
    for number in range(options.warmup, options.warmup + options.steps):
        batch = training.batch(number)
        with timeline.record_all() as recorded:
            busy_before = time.process_time()
            stamps = training.step(*batch)
            used += (time.process_time() - busy_before) / options.steps
        steps.append((stamps.seconds, parts(stamps, recorded), busy(recorded.spans)))
    traffic = (counter.bytes - before) / options.steps
    losses = list(training.losses)
    if training.pipeline is not None:  # but for the last stage's rank they are 0
        losses = [sum(each) for each in zip(*all_gather_object(control, losses), strict=True)]
    last = training.batch(options.warmup + options.steps)
    with f.sampled(f.proportional_mb) as sampled:
        training.step(*last)

    seconds = [step[0] for step in steps]
    own = seconds, used, losses, f.process_peak_mb(), max(sampled)
    everyone = all_gather_object(control, [own, middle(steps)])
    if mesh.rank == 0:
        result = f.figures(
            workload, [f.RankFigures(*each) for each, _ in everyone], **about(options, training)
        )
        _, ways = max(everyone, key=lambda rank: statistics.median(rank[0][0]))  # of the slowest rank
        split = {name: round(1e3 * value, 3) for name, value in ways.items()}
        result["parts_ms"] = {part: split[part] for part in PARTS}
        result["exposed_ms"] = round(sum(split[part] for part in EXPOSED), 3)
        result["streams_ms"] = {stream: split[stream] for stream in STREAMS}
        result["product_gflops"] = round(product, 1)
        result["mfu_of_product"] = float(f"{result['gflops_per_rank'] / product:.4g}")
        result["mfu_of_peak"] = None  # a CPU does not tell how fast its cores could multiply
        result["received_mb"] = round(traffic / 1e6, 3)
        result["formula_mb"] = round(formula(options.strategy, training) / 1e6, 3)
        f.show(result, lines(result, workload), options)


def formula(strategy: str, training: Training) -> float:
    """Bytes that a rank should receive in a step."""
    if strategy == UNSHARDED:
        return 0.0
    ranks = training.mesh.size
    if strategy in PIPELINE:
        rows = ranks * training.workload.stream
        return expected_of_stage(training.model, rows, ends=min(1, ranks - 1))
    if strategy in TENSOR:
        return expected_of_tensor(training.model, ranks, ranks * training.workload.count, TENSOR[strategy])
    return expected(training.model)


def middle(steps: list[tuple[float, dict, dict]]) -> dict[str, float]:
    """The parts, and what the streams did, of the step of median time; the mean of two for an even number."""
    order = sorted(steps, key=lambda step: step[0])
    chosen = [times | streams for _, times, streams in order[(len(steps) - 1) // 2 : len(steps) // 2 + 1]]
    return {name: statistics.fmean(each[name] for each in chosen) for name in chosen[0]}


def product_gflops(low: bool) -> float:
    """10^9 operations per second of a matmul of our kernels: of square matrices, float32 or bfloat16."""
    in_bits = low and device.current().gathered_dtype("bfloat16") == np.uint16
    a, b = (np.ones((SIDE, SIDE), np.float32) for _ in range(2))
    if in_bits:
        a, b = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
    c = np.empty((SIDE, SIDE), np.float32)
    return w.product_gflops(lambda: device.current().kernels.matmul.matmul(a, b, c), SIDE)


def about(options: argparse.Namespace, training: Training) -> dict:
    """What figures belong to."""
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    blas = max(libraries, key=lambda library: "numpy" in library["filepath"])  # SciPy may have loaded its own
    shards, control = training.mesh.shape, training.mesh.communicator("control")
    return {
        "contestant": f"shardrt {options.strategy}",
        "parameters": sum(prod(parameter.whole_shape) for parameter in training.model.parameters()),
        "settings": {
            "strategy": options.strategy,
            "mesh": list(shards),
            "prefetch": options.prefetch,
            "communicator": type(control).__name__,
            "threads_per_rank": blas["num_threads"],
            "warmup": options.warmup,
            "clip": options.clip,
            "loss_chunk": options.loss_chunk,
            "recompute": options.recompute,
            **stages(training),
        },
        "versions": {
            "shardrt": shardrt.__version__,
            # The kernels that it chose decide more than anything else here: AVX-512 or not.
            "blas": f"{blas['internal_api']} {blas['version']} {blas.get('architecture', '')}".strip(),
            **({"onednn": version} if (version := onednn_version()) else {}),
        },
    }


def onednn_version() -> str:
    """Of the one that is installed for us; "" without."""
    return "" if (library := onednn.library()) is None else library.version


def stages(training: Training) -> dict:
    """Of a pipeline: its micro-batches, and how many pieces of the model rank 0 has."""
    if training.pipeline is None:
        return {"micro_batches": 1}
    own = sum(len(stage.pieces) for stage in training.pipeline.stages)
    return {"micro_batches": training.pipeline.table.micro_batches, "pieces_of_rank_0": own}


def lines(result: dict, workload: w.Job) -> list[str]:
    """One strategy's figures for a reader."""
    split, streams = result["parts_ms"], result["streams_ms"]
    message = ", ".join(f"{part} {split[part]:.1f}" for part in PARTS if split[part] >= 0.05)
    per_s = f"{result[f'{workload.UNIT}_per_s']:.1f} {workload.UNIT}/s"
    return [
        f"{workload}, {result['parameters'] / 1e6:.1f} M parameters",
        f"{result['contestant']}: {result['world_size']} ranks, {result['step_ms_median']:.1f} ms per step, "
        f"{per_s}, loss {result['loss']:.6f}",
        f"the step: {message} ms",
        f"exposed communication: {result['exposed_ms']:.1f} ms; beside the step: gathers "
        f"{streams['gather']:.1f}, reductions {streams['reduce']:.1f} ms",
        f"peak memory of the largest rank: {result['peak_rss_mb']:.0f} MB RSS (a page that ranks share "
        f"counts for each), {result['peak_pss_mb']:.0f} MB PSS (it counts once); of all ranks "
        f"{result['job_pss_mb']:.0f} MB PSS",
        f"MFU: {100 * result['mfu_of_product']:.1f} % of a product of {SIDE}^3 in our BLAS, "
        f"{result['product_gflops']:.0f} GFLOP/s per rank (a CPU's theoretical peak: not known)",
        f"traffic per rank and step: {result['received_mb']:.2f} MB received and as much sent; by the "
        f"formula {result['formula_mb']:.2f}",
    ]


def table(results: list[dict]) -> list[str]:
    """All strategies for a reader."""
    unit = "images" if "images_per_s" in results[0] else "tokens"
    rows = [
        f"{'ms of a step':<22}{'step':>9}{'compute':>9}{'exposed':>9}{'optimizer':>10}{'other':>7}"
        f"{'gather':>8}{'reduce':>8}{unit + '/s':>10}{'RSS MB':>8}{'PSS MB':>8}{'MFU %':>7}{'MB sent':>9}"
    ]
    for result in results:
        split, streams = result["parts_ms"], result["streams_ms"]
        compute = sum(split[part] for part in COMPUTE)
        rows.append(
            f"{result['settings']['strategy']:<22}{result['step_ms_median']:9.1f}{compute:9.1f}{result['exposed_ms']:9.1f}"
            f"{split['optimizer']:10.1f}{split['other']:7.1f}{streams['gather']:8.1f}{streams['reduce']:8.1f}"
            f"{result[unit + '_per_s']:10.1f}{result['peak_rss_mb']:8.0f}{result['peak_pss_mb']:8.0f}"
            f"{100 * result['mfu_of_product']:7.1f}{result['received_mb']:9.1f}"
        )
    if len(results) <= len(STRATEGIES):
        rows.append("without the hybrids, which make 2 copies and need an even number of ranks")
    rows.append("step = compute + exposed + optimizer + other; gather and reduce: their streams, beside it")
    return rows


if __name__ == "__main__":
    main()
