"""The contestant PyTorch: the same GPT-2, compiled, with its fastest attention and fused AdamW.

Parameters are float32, products bfloat16 by autocast: the same precision as shardrt's. Where torch.compile
fails (it needs a C compiler), the model runs as it is, and says so.

    python -m bench.gpu.torch_peer '{"layers": 12, ...}'
"""

import os
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from .. import workload as w
from ..peers.torch_step import fsdp2, network
from .contestant import Timed, serve
from .job import Job


class Trainer(Timed):
    """One model and its optimizer."""

    def __init__(self, settings: dict) -> None:
        self.job = Job(**settings)
        self._cuda = self.job.device == "cuda"
        if self._cuda:
            torch.zeros(1, device="cuda")  # the context, before memory is counted
        self._free = self._free_now()
        torch.manual_seed(0)
        model = network(self.job)
        if self.job.weights and os.path.exists(self.job.weights):  # else their writer has failed
            with np.load(self.job.weights) as values:
                model.load_state_dict({name: torch.from_numpy(values[name]) for name in values.files})
        self.model = model.to(self.job.device)
        self._compiled = self.job.compiled
        if self._compiled == "blocks":
            for block in self.model.blocks:
                block.compile()
        if self.job.fsdp:
            self._shard()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=w.LEARNING_RATE, weight_decay=w.WEIGHT_DECAY, fused=True
        )
        self._attention = self._fastest_attention() if self._cuda else "default"
        self._loss = torch.compile(self._forward) if self._compiled == "model" else self._forward

    def about(self) -> dict:
        """Its first line."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"parameters": parameters, "attention": self._attention}

    def steps(self, count: int) -> dict:
        """Also the bytes of tensors at their most, "held", and what is "compiled"."""
        held = torch.cuda.max_memory_allocated if self._cuda else int
        found = super().steps(count)
        return found | {"held": held(), "compiled": self._compiled}

    def train(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self._backward(tokens, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = self.job.micro_batches
        for x, y in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            x, y = (part.to(self.job.device, non_blocking=True) for part in (x, y))
            loss = self._try(x, y)
            loss.backward()
        return loss

    def _try(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss; without the compiler from the first time on that it fails."""
        try:
            return self._loss(x, y)
        except Exception as error:  # its own kinds
            if not self._compiled or self._step:
                raise
            print(f"torch.compile failed: {error}", file=sys.stderr)
            self._compiled, self._loss = "", self._forward
            for block in self.model.blocks:
                block._compiled_call_impl = None  # there is no other way back from Module.compile
            return self._loss(x, y)

    def _shard(self) -> None:
        """FSDP2 with products in bfloat16 by its own policy."""
        if not dist.is_initialized():
            backend = "nccl" if self._cuda else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        fsdp2(self.model, self.job.device, low=self.job.dtype == "bfloat16")

    def _forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        low = self.job.dtype == "bfloat16" and not self.job.fsdp
        with torch.autocast(self.job.device, torch.bfloat16) if low else nullcontext():
            logits = self.model(x).float() if self.job.fsdp else self.model(x)
            return F.cross_entropy(logits.flatten(0, 1), y.flatten()) / self.job.micro_batches

    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        batch = map(torch.from_numpy, self.job.batch_of(step, 0))
        return tuple(part.pin_memory() if self._cuda else part for part in batch)

    def _fastest_attention(self) -> str:
        """Leave only the fastest of PyTorch's own on for this shape; its name."""
        job, enable = self.job, torch.backends.cuda
        shape = job.batch // job.micro_batches, job.heads, job.seq, job.dim // job.heads
        dtype = torch.bfloat16 if self.job.dtype == "bfloat16" else torch.float32
        q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        switches = {
            "cudnn": enable.enable_cudnn_sdp,
            "flash": enable.enable_flash_sdp,
            "efficient": enable.enable_mem_efficient_sdp,
        }
        enable.enable_math_sdp(False)
        times = {}
        for name in switches:
            for other, switch in switches.items():
                switch(other == name)
            try:
                times[name] = min(self._seconds(q, k, v) for _ in range(4))
            except RuntimeError:
                continue  # not for this type or shape
        if not times:
            enable.enable_math_sdp(True)
            return "math"
        chosen = min(times, key=times.get)
        for name, switch in switches.items():
            switch(name == chosen)
        del q, k, v
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return chosen

    def _seconds(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
        """Of attention forward and backward."""
        self._finish()
        start = time.perf_counter()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y.sum(), (q, k, v))
        self._finish()
        return time.perf_counter() - start

    def _finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _free_now(self) -> int:
        return torch.cuda.mem_get_info()[0] if self._cuda else 0


if __name__ == "__main__":
    serve(Trainer)
