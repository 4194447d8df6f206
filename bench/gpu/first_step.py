"""One FULL_SHARD step on the GPU beside the CPU's: the row to read first."""

from functools import partial

import numpy as np

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread

from ..training import model_of, shard
from ..workload import Workload
from .report import agreement
from .state import Run

SMALL = Workload(layers=2, dim=128, heads=4, seq=64, batch=4, vocab=257)
CLOSE = {"float32": 1e-5, "bfloat16": 3e-2}  # relative difference


def measure(run: Run, workload: Workload = SMALL) -> None:
    """A row for each type: the loss after a step, and how far the parameters are from the CPU's."""
    for dtype, close in CLOSE.items():
        with run.guarded(dtype):
            loss, weights = thread.run(1, partial(step, "cuda", dtype, workload))[0]
            on_cpu, expected = thread.run(1, partial(step, "cpu", dtype, workload))[0]
            off = max(_difference(weights[name], expected[name]) for name in expected)
            off = max(off, abs(loss - on_cpu) / abs(on_cpu))
            run.add(
                f"FULL_SHARD, {dtype}: loss after a step",
                loss,
                beside="CPU",
                theirs=on_cpu,
                check=agreement(off, close, "loss and parameters "),
            )


def step(name: str, dtype: str, workload: Workload) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, parameters) after one update of a clipped gradient, on the device `name`."""
    mesh = init_device_mesh(name)
    shardrt.manual_seed(0)
    model = model_of(workload)
    shard(model, mesh, dtype)
    # Gradients as small as their rounding errors, of keys' biases say, must not make whole steps of lr.
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    tokens, targets = workload.batch_of(0, 0)
    F.cross_entropy(model(tokens), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens), targets)
    return loss.item(), {name: np.array(values) for name, values in full_state_dict(model).items()}


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / max(1.0, np.linalg.norm(expected)))
