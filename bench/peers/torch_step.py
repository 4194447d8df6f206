"""Times PyTorch's training step: FSDP2 (`fully_shard`), DDP or a single process, on gloo and fused AdamW.

Starts one process per rank, one thread each. The last line is one JSON object, as bench.step prints it.

    python -m bench.peers.torch_step --ranks 2 --strategy fsdp2 --layers 6 --dim 384 --heads 6
"""

import argparse
import os
import sys
import time

from bench import workload as w
from bench.peers.launch import launch, one_thread


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.torch_step", description="PyTorch's step")
    w.add_arguments(parser)
    parser.add_argument("--strategy", choices=("fsdp2", "ddp", "single"), default="fsdp2")
    parser.add_argument("--ranks", type=w.positive, default=1, metavar="N", help="processes to start (1)")
    options = parser.parse_args()
    if options.strategy == "single" and options.ranks > 1:
        parser.error("--strategy single runs on one rank; fsdp2 and ddp on several")
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
        model.parameters(), lr=w.LEARNING_RATE, weight_decay=w.WEIGHT_DECAY, fused=True
    )

    seconds, losses = [], []
    for step in range(options.warmup + options.steps):
        tokens, targets = (torch.from_numpy(array) for array in workload.batch_of(step, rank))
        start = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        if options.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)

    ranks = [None] * world_size
    dist.all_gather_object(ranks, (seconds[options.warmup :], w.process_peak_mb(), losses))
    if rank == 0:
        seconds_of, peaks, losses_of = zip(*ranks, strict=True)
        settings = {
            "strategy": options.strategy,
            "threads_per_rank": torch.get_num_threads(),
            "warmup": options.warmup,
            "clip": options.clip,
            "LD_PRELOAD": os.environ.get("LD_PRELOAD", ""),
        }
        result = w.figures(
            workload,
            contestant=f"torch {options.strategy}",
            step_seconds=seconds_of,
            losses=losses_of,
            peak_rss_mb=peaks,
            parameters=parameters,
            settings=settings,
            versions={"torch": torch.__version__},
        )
        w.show(result, options)
    leave(dist)


def build(workload: w.Workload, options: argparse.Namespace):
    """(model, number of parameters), wrapped as the strategy says."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from bench.peers.torch_gpt import GPT

    torch.manual_seed(0)
    model = GPT(
        layers=workload.layers,
        heads=workload.heads,
        width=workload.dim,
        time=workload.seq,
        vocab=workload.vocab,
    )
    if options.weights:
        from safetensors.torch import load_model

        load_model(model, os.path.join(options.weights, "model.safetensors"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if options.strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model), parameters
    if options.strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, parameters


def leave(dist) -> None:
    """End this process at once: gloo's own way out aborts now and then ("terminate called ...")."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
