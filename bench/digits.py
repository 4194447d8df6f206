"""Trains a recipe of image classification through the seam of shardrt.train.tasks; notes the curve and time.

    mpirun -n 2 python -m bench.digits models/configs/digits-vit.toml --json bench/results/digits-vit.json

The whole loop in one function: what models.train does beside it (checkpoints, clipping, plans) is left out.
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import json
import time
import tomllib
from pathlib import Path
from typing import Any

from models.tasks import ImageClassification, ImagesConfig
from shardrt import optim
from shardrt.comm import DeviceMesh, init_device_mesh
from shardrt.fsdp import fully_shard, set_gradient_divide_factor
from shardrt.train.config import OptimizerConfig
from shardrt.train.metrics import over_ranks

EVALUATIONS = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.digits", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the curve there as well")
    arguments = parser.parse_args()
    recipe = tomllib.loads(arguments.config.read_text())
    mesh = init_device_mesh("auto")
    result = train(recipe, mesh, arguments.seed, print if mesh.rank == 0 else lambda line: None)
    if mesh.rank == 0:
        found = {"config": arguments.config.name, "recipe": recipe, "ranks": mesh.size, **result}
        print(json.dumps({name: found[name] for name in ("seconds", "cpu_seconds", "accuracy")}))
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def train(recipe: dict, mesh: DeviceMesh, seed: int, say: Any) -> dict:
    """The loop; gives the accuracy on the held-out images, the seconds and the curve."""
    began, used = time.perf_counter(), time.process_time()
    steps, wanted = recipe["steps"], OptimizerConfig(**recipe["optimizer"])
    task = ImageClassification(
        ImagesConfig(**recipe["images"]), mesh, batch_size=recipe["batch_size"], seed=seed
    )
    shardrt.manual_seed(seed)
    model = task.model()
    for unit in task.units(model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_gradient_divide_factor(model, 1.0)  # the loss is a share of the whole step's already
    optimizer = optim.AdamW(optim.decay_groups(model, wanted.weight_decay), lr=wanted.lr, betas=wanted.betas)
    curve, loss_so_far = [], 0.0
    for step, batch in enumerate(task.batches(0, steps)):
        shardrt.manual_seed(seed, step)
        for group in optimizer.param_groups:
            group["lr"] = wanted.lr_at(step, steps)
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_so_far += float(loss)
        if (step + 1) % (steps // EVALUATIONS) == 0:
            curve.append(evaluated(task, model, step + 1, loss_so_far / (steps // EVALUATIONS), began))
            loss_so_far = 0.0
            say(
                "step {step:5d}  loss {loss:.4f}  held out {held_out_loss:.4f}  accuracy "
                "{held_out_accuracy:.2%}  {seconds:.1f} s".format(**curve[-1])
            )
    used = time.process_time() - used
    return {
        "seconds": curve[-1]["seconds"],
        "cpu_seconds": used,
        "accuracy": curve[-1]["held_out_accuracy"],
        "curve": curve,
    }


def evaluated(task: ImageClassification, model: Any, step: int, loss: float, began: float) -> dict:
    """A point of the curve: figures over all ranks."""
    figures = task.evaluate(model)
    (mean_loss,) = over_ranks(task.mesh, "sum", loss)
    point = {"step": step, "loss": mean_loss, "seconds": time.perf_counter() - began}
    for name, (total, count) in figures.items():
        total, count = over_ranks(task.mesh, "sum", total, count)
        point[name] = total / count
    return point


if __name__ == "__main__":
    main()
