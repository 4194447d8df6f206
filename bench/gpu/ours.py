"""The contestant shardrt: GPT-2 on one GPU, or one for each rank, as bench.gpu.contestant asks it to train.

python -m bench.gpu.ours '{"layers": 12, ..., "strategy": "FULL_SHARD", "dtype": "bfloat16"}'
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import hashlib
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import CPUOffloadPolicy, no_sync

from .. import workload as w
from ..training import UNSHARDED, model_of, shard
from .contestant import Timed, serve
from .job import Job


class Trainer(Timed):
    """One model and its optimizer. strategy "NONE": not sharded at all, and then all float32."""

    def __init__(self, settings: dict) -> None:
        import cupy

        self.job = Job(**settings)
        self._cupy = cupy
        self.mesh = init_device_mesh("cuda")
        self.mesh.device.warm_up()
        self._free = self._free_now()
        shardrt.use_deterministic_algorithms(self.job.deterministic)
        shardrt.manual_seed(0)
        self.model = model_of(self.job)
        if self.job.strategy != UNSHARDED:
            offload = CPUOffloadPolicy(parameters=False, gradients=False) if self.job.offload else None
            how = {"strategy": self.job.strategy, "offload_policy": offload}
            shard(self.model, self.mesh, self.job.dtype, **how)
        if self.job.save:
            values = {name: np.asarray(value) for name, value in full_state_dict(self.model).items()}
            np.savez(Path(self.job.save), **values)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=w.LEARNING_RATE, weight_decay=w.WEIGHT_DECAY)

    def about(self) -> dict:
        """Its first line."""
        return {"parameters": sum(parameter.size for parameter in self.model.parameters())}

    def update(self, rounds: int = 5) -> dict:
        """{"update": seconds of the optimizer's step alone, the least of a few}, after a micro-batch each."""
        times, rows = [], self.job.batch // self.job.micro_batches
        tokens, targets = (array[:rows] for array in self.batch(self._step))
        for _ in range(rounds):
            self._backward(tokens, targets, 1)
            self._finish()
            start = time.perf_counter()
            self._update()
            self._finish()
            times.append(time.perf_counter() - start)
        return {"update": min(times)}

    def digest(self) -> dict:
        """{"digest": of all parameters' bits}."""
        digest = hashlib.sha256()
        for name, values in sorted(full_state_dict(self.model).items()):
            digest.update(name.encode() + np.ascontiguousarray(values).tobytes())
        return {"digest": digest.hexdigest()}

    def train(self, tokens: np.ndarray, targets: np.ndarray) -> shardrt.Tensor:
        """One step, issued and not waited for; the loss of its last micro-batch."""
        loss = self._backward(tokens, targets, self.job.micro_batches)
        self._update()
        return loss

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Of a step: tokens and targets of this rank."""
        return self.job.batch_of(step, self.mesh.rank)

    def _backward(self, tokens: np.ndarray, targets: np.ndarray, parts: int) -> shardrt.Tensor:
        """All micro-batches of a step; the loss of the last."""
        for part, (x, y) in enumerate(zip(np.split(tokens, parts), np.split(targets, parts), strict=True)):
            sums = part == parts - 1 or self.job.strategy == UNSHARDED
            with nullcontext() if sums else no_sync(self.model):
                loss = self.model(x, y) * (1 / parts)
                loss.backward()
        return loss

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _finish(self) -> None:
        self._cupy.cuda.Device().synchronize()

    def _free_now(self) -> int:
        """Free bytes of the GPU."""
        return self._cupy.cuda.runtime.memGetInfo()[0]


if __name__ == "__main__":
    serve(Trainer)
