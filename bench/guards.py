"""What watching costs: the flight recorder, the watchdog, the plan and the comparison of calls, of a step.

Together they are too little to show in the time of a step on a machine that does other things as well. So
each call is timed by itself, many times over, and multiplied by how often a step makes it. Much of it runs in
the threads of streams beside computing, so the sum is the most that it can cost.

    mpirun -n 2 python -m bench.guards --config models/configs/default.toml
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import train
from shardrt import optim
from shardrt.comm import init_device_mesh
from shardrt.comm.calls import pack
from shardrt.comm.shm import ShmCommunicator
from shardrt.faults.flight import Recorder
from shardrt.faults.watchdog import _BEAT, Watch
from shardrt.fsdp import units
from shardrt.fsdp.plan import Plan
from shardrt.train.job import optimizer_of, sharded_model
from shardrt.train.loop import backward, batches_of
from shardrt.train.recipe import Recipe

WARM = 5  # steps before the first that counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.guards", description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=train.DEFAULT, metavar="TOML", help="what is trained")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps that are timed (40)")
    options = parser.parse_args()
    config = train.load(options.config)
    mesh = init_device_mesh("cpu")
    if not isinstance(mesh.communicator("control"), ShmCommunicator):
        parser.error("needs several ranks of one machine: mpirun -n 2 python -m bench.guards")
    folder = Path(tempfile.mkdtemp()) if mesh.rank == 0 else None
    with Watch(mesh, config.watchdog.limits) as watch:
        watch.keep(folder)
        result = measured(config, mesh, watch, options.steps)
    if mesh.rank == 0:
        print(json.dumps({"config": options.config.name, "ranks": mesh.size, **result}))


def measured(config: Recipe, mesh: Any, watch: Watch, steps: int) -> dict[str, Any]:
    """Times of calls, how many a step makes, and what that is of a step."""
    calls: Counter[str] = Counter()
    count_calls(calls)
    task = config.task()
    model = sharded_model(config, mesh, task)
    optimizer = optimizer_of(config, model)
    scaler = optim.GradScaler(enabled=False)
    took = []
    for step in range(WARM + steps):
        if step == WARM:
            calls.clear()
            records = watch.recorder.latest
        began = time.perf_counter()
        watch.step(step + 1)
        shardrt.manual_seed(config.seed, step)
        backward(config, task, model, batches_of(config, mesh, task, step), scaler, step)
        watch.phase("optimizer")
        shardrt.nn.utils.clip_grad_norm_(list(model.parameters()), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        watch.phase("report")
        took.append(time.perf_counter() - began)
    per_step = {name: number / steps for name, number in calls.items()}
    per_step["record"] = (watch.recorder.latest - records) / steps
    unit_calls = costs(model, mesh, watch)
    step_us = 1e6 * statistics.median(took[WARM:])
    parts = {name: unit_calls[name] * per_step[name] for name in ("record", "name", "plan", "compare")}
    parts["watchdog"] = unit_calls["tick"] * step_us / 1e6 / _BEAT
    return {
        "step_ms_median": round(step_us / 1e3, 2),
        "us_per_call": {name: round(value, 2) for name, value in unit_calls.items()},
        "calls_per_step": {name: round(value, 1) for name, value in per_step.items()},
        "us_per_step": {name: round(value, 1) for name, value in parts.items()},
        "percent_of_a_step": round(100 * sum(parts.values()) / step_us, 3),
    }


def count_calls(calls: Counter[str]) -> None:
    """Count forwards, collectives that are named for the recorder, and comparisons."""
    for owner, name, counted in (
        (Plan, "begin", "plan"),
        (Recorder, "facts", "name"),
        (ShmCommunicator, "_meet", "compare"),
    ):
        setattr(owner, name, _counting(getattr(owner, name), calls, counted))


def _counting(function: Callable, calls: Counter[str], name: str) -> Callable:
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return counting


def costs(model: Any, mesh: Any, watch: Watch) -> dict[str, float]:
    """Microseconds of one record, of naming a collective, of a forward's plan, a comparison, a look."""
    recorder, control = watch.recorder, mesh.communicator("control")
    schedule = units(model)[0].schedule
    facts = ("gather", 1, "all_gather", "blocks.0", None)
    row = recorder.facts(*facts)

    def plan() -> None:
        schedule.plan.begin()
        for unit in list(schedule.plan.order):
            schedule.plan.skip_to(unit)
            schedule.plan.advance(called=True)
            if unit is not schedule.root:
                schedule.plan.skip_out_of(unit)
        schedule.plan.skip_out_of(schedule.root)

    form = "barrier", (0, "blocks.0")
    control.barrier(stream=mesh.device.current_stream, what="blocks.0")
    control._prepare(form, pack(control._names, "barrier", None, 0, "blocks.0"), None, False, None)
    page = (control._teller.sequence + 1) % 2  # peers do not look at the next call's before it is made

    def compare() -> None:
        notice, call, _ = control._prepared.get(form)
        heads = notice.pages[page].heads
        heads[control.rank][:] = call
        heads.count(call)

    def look() -> None:
        recorder.beat()
        watch._arm(watch._limit())

    return {
        "record": best(lambda: recorder._write(1, *row)),
        "name": best(lambda: recorder.facts(*facts)),
        "plan": best(plan, 1000),
        "compare": best(compare, 5000),
        "tick": best(look, 100),
    }


def best(function: Callable[[], None], times: int = 20_000) -> float:
    """Microseconds of a call: the median of five rounds."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            function()
        rounds.append(1e6 * (time.perf_counter() - began) / times)
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
