"""What a training step asks of a GPU and what that costs the host, counted without one.

The installed CuPy runs over a CUDA runtime that does nothing (tests/softgpu/idle.py), so all above it is what
a GPU would see: launches by kernel, products, copies, events. The host's time is that of this processor and
holds what the idle GPU's Python takes for a call, which says nothing about a driver: read it beside the
yardstick, or beside another commit's. Attention is counted as its own kernels, cuDNN not being there.

    python -m bench.launches --strategy FULL_SHARD --dtype bfloat16
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from bench.command_line import add_forms
from bench.environment import facts, write_result
from bench.gpu.job import SIZES, Job
from bench.table import as_csv

WARM = 3  # steps before the first that counts
YARDSTICK = 20_000  # numbers squared in the loop that times are told beside
COLUMNS = ("what", "name", "per_step")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.launches", description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=list(SIZES), default="gpt2", help="the model (gpt2)")
    parser.add_argument("--strategy", default="FULL_SHARD", help="a sharding strategy, or NONE, in float32")
    parser.add_argument("--dtype", default="bfloat16", help="of gathered parameters and activations")
    parser.add_argument("--seq", type=int, default=64, metavar="T", help="launches don't depend on it (64)")
    parser.add_argument("--layers", type=int, metavar="N", help="as in the size")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="steps that are timed (30)")
    add_forms(parser)
    options = parser.parse_args()
    size = SIZES[options.size]
    job = replace(size, batch=1, seq=options.seq, strategy=options.strategy, dtype=options.dtype)
    job = replace(job, layers=options.layers or job.layers)
    result = facts("python -m bench.launches " + " ".join(sys.argv[1:])) | measured(job, options.steps)
    if options.output:
        write_result(options.output, result)
    if options.json:
        print(json.dumps(result))
    else:
        print(as_csv(COLUMNS, result["counts"]) if options.csv else "\n".join(lines(result)))


def measured(job: Job, steps: int) -> dict:
    """Counts of one step; the host's microseconds, the median over `steps`. In a process of its own."""
    from tests.softgpu import idle

    gpu = idle.start()
    from bench.gpu.ours import Trainer

    trainer = Trainer(job.settings())
    batch = trainer.batch(0)

    def step() -> None:
        trainer.train(*batch)

    for _ in range(WARM):
        step()
    gpu.counts.clear()
    step()
    counts = Counter(gpu.counts)
    rows = [
        {"what": what, "name": name, "per_step": count}
        for (what, name), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1]))
    ]
    launches = sum(count for (what, _), count in counts.items() if what in ("launch", "product", "set"))
    return {
        "model": f"{job.layers} x {job.dim}, vocab {job.vocab}, {job.strategy}, {job.dtype}",
        "launches": launches,
        "python_calls": calls_of(step),
        **timed(step, steps),
        "counts": rows,
    }


def calls_of(function: Callable[[], None]) -> int:
    """Functions that it calls, Python's and C's: what the host does, without noise."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def timed(step: Callable[[], None], steps: int) -> dict[str, float]:
    """This thread's processor time by turns with the yardstick's: medians, and what each took at the least.

    The ratio is of the latter, which others on the machine disturb less.
    """
    numbers, times, beside = range(YARDSTICK), [], []
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        begin = time.thread_time_ns()
        [number * number for number in numbers]
        middle = time.thread_time_ns()
        step()
        times.append((time.thread_time_ns() - middle) / 1e3)
        beside.append((middle - begin) / 1e3)
    return {
        "host_us": round(statistics.median(times), 1),
        "yardstick_us": round(statistics.median(beside), 1),
        "host_us_least": round(min(times), 1),
        "yardstick_us_least": round(min(beside), 1),
        "host_per_yardstick": round(min(times) / min(beside), 1),
    }


def lines(result: dict) -> list[str]:
    """For a reader."""
    rows = [f"{row['per_step']:>6}  {row['what']} {row['name']}" for row in result["counts"]]
    return [
        f"GPT {result['model']}: one training step, nothing computed",
        *rows,
        f"{result['launches']:>6}  launches: kernels, products and sets",
        f"{result['python_calls']:>6}  calls of functions on the host",
        f"host: {result['host_us']:,.0f} us per step, at the least {result['host_us_least']:,.0f}, which is "
        f"{result['host_per_yardstick']} times a loop that squares {YARDSTICK} numbers",
    ]


if __name__ == "__main__":
    main()
