"""What both sides of test_pipeline.py do, in numbers and names; knows neither shardrt nor PyTorch."""

from bench.workload import LlamaWorkload, ViTWorkload, Workload
from tests.parity.features import OPTIMIZERS, STEPS  # noqa: F401  the same for all parity

MICRO_BATCHES, RANKS = 4, 2
JOBS = {
    "gpt": Workload(layers=4, dim=32, heads=4, seq=16, batch=8, vocab=64),
    "llama": LlamaWorkload(layers=4, dim=32, heads=4, seq=16, batch=8, vocab=64, kv_heads=2, hidden=48),
    "vit": ViTWorkload(layers=4, dim=32, heads=4, hidden=48, image=8, patch=4, batch=8, classes=5),
}
# AdamW makes of rounding steps of full size: the gradient of a bias of keys is nothing else.
OPTIMIZER = {"gpt": "sgd", "llama": "adamw", "vit": "sgd"}
ACCUMULATED = "accumulated"  # by one process, over the same micro-batches
STAGES = {"1F1B": 1, "ZB-H1": 1, "Interleaved1F1B": 2}  # per rank; PyTorch's own pipelines
