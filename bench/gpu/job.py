"""The settings of a contestant: a GPT, its batch, and its training. Knows neither shardrt nor PyTorch."""

from dataclasses import asdict, dataclass

from ..workload import Workload


@dataclass(frozen=True)
class Job(Workload):
    """A training job on one GPU. `batch` sequences make a step, in so many micro-batches.

    strategy: shardrt's, or "NONE". deterministic: algorithms that give the same bits in every process. What
    PyTorch does: compiled: the "model", or its "blocks", one for all, which takes a tenth of the time; fsdp:
    FSDP2 at world size 1. save, weights: a .npz file to write the initial weights to, or to read them from.
    device: for tests of PyTorch's side.
    """

    layers: int = 12
    dim: int = 768
    heads: int = 12
    seq: int = 1024
    batch: int = 32
    vocab: int = 50304
    micro_batches: int = 1
    dtype: str = "bfloat16"
    strategy: str = "FULL_SHARD"
    offload: bool = False
    deterministic: bool = False
    compiled: str = "model"
    fsdp: bool = False
    save: str = ""
    weights: str = ""
    device: str = "cuda"

    def flops_per_token(self, parameters: int) -> float:
        """A training step's operations for each token, attention causal: 6 N + 6 L C T (as in llm.c)."""
        return 6.0 * parameters + 6.0 * self.layers * self.dim * self.seq

    def settings(self, **changes: object) -> dict:
        """As a contestant takes them."""
        return asdict(self) | changes


SIZES = {
    "gpt2": Job(),
    "gpt2-xl": Job(layers=48, dim=1600, heads=25, batch=8, compiled="blocks"),
}
