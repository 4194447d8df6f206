"""Times PyTorch's training step: FSDP2, FSDP1, DDP, TP, PP or one process, on gloo, with fused AdamW.

Starts one process per rank, one thread each. The last line is one JSON object, as bench.step prints it.

    python -m bench.peers.torch_step --ranks 2 --strategy fsdp2 --size gpt2
"""

import argparse
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean

from .. import figures as f
from .. import workload as w
from .launch import launch, one_thread

STRATEGIES = {
    "fsdp2": "FSDP2",  # fully_shard
    "fsdp2-bf16": "FSDP2 bfloat16",  # computes in bfloat16, reduces in float32
    "fsdp1": "FSDP1",  # FullyShardedDataParallel
    "ddp": "DDP",
    "tp": "TP",  # parallelize_module, on the batches of all ranks, with loss_parallel
    "tp-sp": "TP SP",  # with SequenceParallel
    "pp-1f1b": "PP 1F1B",  # torch.distributed.pipelining, on the batches of all ranks
    "pp-zb": "PP ZB-H1",  # ScheduleInterleavedZeroBubble with one stage per rank
    "pp-zbv": "PP ZBV",  # ScheduleZBVZeroBubble
    "single": "one process",
}


TENSOR = ("tp", "tp-sp")
PIPELINE = {"pp-1f1b": "1F1B", "pp-zb": "ZB-H1", "pp-zbv": "ZBVZeroBubble"}


def main() -> None:
    """Train one model in PyTorch and print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.torch_step", description="PyTorch's step")
    w.add_arguments(parser)
    parser.add_argument("--strategy", choices=STRATEGIES, default="fsdp2")
    parser.add_argument("--ranks", type=w.positive, default=1, metavar="N", help="processes to start (1)")
    message = "end by SIGALRM in a first step that takes longer; 0: never (0)"
    parser.add_argument("--first-step", type=float, default=0.0, metavar="MS", help=message)
    options = parser.parse_args()
    if options.strategy == "single" and options.ranks > 1:
        parser.error("--strategy single runs on one rank; the others on several")
    if options.strategy in PIPELINE and options.clip is not None:
        parser.error("--clip: a pipeline's norm is over all stages, which PyTorch leaves to its users")
    try:
        w.workload_of(options)
    except ValueError as error:
        parser.error(str(error))
    if "RANK" in os.environ:
        run(options)
    else:
        print(launch(["-m", "bench.peers.torch_step", *sys.argv[1:]], options.ranks, one_thread()), end="")


def run(options: argparse.Namespace) -> None:
    """One rank's part."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    workload = w.workload_of(options)
    model, parameters = build(workload, options)
    optimizer = torch.optim.AdamW(
        groups_of(model, options), lr=w.LEARNING_RATE, weight_decay=w.WEIGHT_DECAY, fused=True
    )

    def gradients(inputs, targets):
        if options.strategy in PIPELINE:
            return model.step(inputs, targets)
        with loss_of_parts(options):
            logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
            loss.backward()
        return loss

    def train(inputs, targets):
        loss = gradients(inputs, targets)
        if options.clip is not None:
            clip(model, options)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def batch(step):
        together = options.strategy in TENSOR or options.strategy in PIPELINE
        given = workload.batch_of_all(step, world_size) if together else workload.batch_of(step, rank)
        return (torch.from_numpy(array) for array in given)

    seconds, losses, processor = [], [], []
    dist.barrier()
    signal.setitimer(signal.ITIMER_REAL, options.first_step / 1e3)  # SIGALRM ends this process
    for step in range(options.warmup + options.steps):
        inputs, targets = batch(step)
        start, used = time.perf_counter(), time.process_time()
        losses.append(train(inputs, targets))
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
        signal.setitimer(signal.ITIMER_REAL, 0)
    with f.sampled(f.proportional_mb) as sampled:
        train(*batch(options.warmup + options.steps))

    used = fmean(processor[options.warmup :])
    own = f.RankFigures(seconds[options.warmup :], used, losses, f.process_peak_mb(), max(sampled))
    ranks = [None] * world_size
    dist.all_gather_object(ranks, own)
    gflops = [None] * world_size
    dist.barrier()  # all ranks multiply at the same time, as in a step
    dist.all_gather_object(gflops, product_gflops(options.strategy.endswith("bf16")))
    if options.strategy in PIPELINE:  # the last stage has the losses, others 0
        message = max((each.losses for each in ranks), key=any)
        ranks = [replace(each, losses=message) for each in ranks]
    if rank == 0:
        settings = {
            "strategy": options.strategy,
            "threads_per_rank": torch.get_num_threads(),
            "warmup": options.warmup,
            "clip": options.clip,
            "micro_batches": options.micro_batches if options.strategy in PIPELINE else 1,
            "LD_PRELOAD": os.path.basename(os.environ.get("LD_PRELOAD", "")),
        }
        result = f.figures(
            workload,
            ranks,
            contestant=f"torch {STRATEGIES[options.strategy]}",
            parameters=parameters,
            settings=settings,
            versions={"torch": torch.__version__, "blas": blas(torch.__config__.show())},
        ) | {"product_gflops": round(fmean(gflops), 1)}
        rate = f"{result[f'{workload.UNIT}_per_s']:.1f} {workload.UNIT}/s"
        memory = f"{result['peak_rss_mb']:.0f} MB RSS and {result['peak_pss_mb']:.0f} MB PSS per rank"
        message = f"{world_size} ranks, {result['step_ms_median']:.1f} ms per step, {rate}, {memory}"
        f.show(result, [f"{result['contestant']}: {message}, loss {result['loss']:.6f}"], options)
    leave(dist)


def build(workload: w.Job, options: argparse.Namespace):
    """(model, number of parameters), wrapped as the strategy says."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    model = network(workload)
    if options.weights:
        from safetensors.torch import load_model

        load_model(model, os.path.join(options.weights, "model.safetensors"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if options.strategy in TENSOR:
        from .torch_tensor import cut

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        return cut(model, mesh, sequence=options.strategy == "tp-sp", loss_parallel=True), parameters
    if options.strategy in PIPELINE:
        from .torch_pipeline import Pipeline

        return Pipeline(model, PIPELINE[options.strategy], options.micro_batches), parameters
    if options.strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model), parameters
    if options.strategy == "fsdp1":
        blocks = ModuleWrapPolicy({type(model.blocks[0])})
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=torch.device("cpu"))
        return wrapped, parameters
    if options.strategy in ("fsdp2", "fsdp2-bf16"):
        fsdp2(model, "cpu", low=options.strategy == "fsdp2-bf16")
    return model, parameters


def fsdp2(model, device: str, *, low: bool) -> None:
    """FSDP2 as it is meant to be used: a unit per block. low: compute in bfloat16, reduce in float32."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kinds = (torch.bfloat16, torch.float32) if low else (None, None)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(*kinds))


def product_gflops(low: bool) -> float:
    """10^9 operations per second of PyTorch's matmul of square matrices, float32 or bfloat16."""
    import torch

    kind = torch.bfloat16 if low else torch.float32
    a, b = (torch.ones(w.SIDE, w.SIDE, dtype=kind) for _ in range(2))
    return w.product_gflops(lambda: torch.mm(a, b), w.SIDE)


def blas(config: str) -> str:
    """The libraries of products among what PyTorch tells of how it was built."""
    lines = (line.strip(" -") for line in config.splitlines())
    named = [line for line in lines if "Library Version" in line or line.startswith("Intel(R) MKL-DNN")]
    return "; ".join(line.split(" for ")[0].split(" (Git")[0] for line in named)


def loss_of_parts(options: argparse.Namespace):
    """A context for the loss of sharded logits."""
    if options.strategy not in TENSOR:
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def groups_of(model, options: argparse.Namespace):
    """What the optimizer gets."""
    if options.strategy not in TENSOR:
        return model.parameters()
    from .torch_tensor import parameters_of

    return parameters_of(model)


def network(workload: w.Job):
    """The model, in PyTorch."""
    from . import torch_models as models

    shape = {"layers": workload.layers, "heads": workload.heads, "width": workload.dim}
    if isinstance(workload, w.ViTWorkload):
        sizes = {name: getattr(workload, name) for name in ("hidden", "image", "patch", "classes")}
        return models.ViT(**shape, **sizes)
    shape |= {"time": workload.seq, "vocab": workload.vocab}
    if isinstance(workload, w.LlamaWorkload):
        return models.Llama(**shape, kv_heads=workload.kv_heads, hidden=workload.hidden)
    return models.GPT(**shape)


def clip(model, options: argparse.Namespace) -> None:
    """The global norm of the gradients, by the way that each strategy has for it."""
    import torch

    if options.strategy == "fsdp1":
        model.clip_grad_norm_(options.clip)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)


def leave(dist) -> None:
    """End this process at once: gloo's own way out aborts now and then ("terminate called ...")."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
