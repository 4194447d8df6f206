"""Times shardrt's training step: forward, loss, backward and AdamW, on the GPT of models/gpt.py.

The last line on rank 0 is one JSON object: step_ms_median, tokens_per_s (all ranks), peak_rss_mb (the
largest rank's) and what they belong to.

    mpirun -n 2 python -m bench.step --layers 6 --dim 384 --heads 6 --strategy FULL_SHARD
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import time
from dataclasses import replace

import numpy as np
from threadpoolctl import threadpool_info

import shardrt.checkpoint
from bench import workload as w
from models.gpt import GPT, GPTConfig
from shardrt import device, nn, optim
from shardrt.comm import DeviceMesh, init_device_mesh
from shardrt.fsdp import ShardingStrategy, fully_shard
from shardrt.train.errors import USAGE, one_line


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step", description="Times shardrt's training step."
    )
    w.add_arguments(parser)
    strategies = [strategy.name for strategy in ShardingStrategy]
    parser.add_argument(
        "--strategy",
        choices=[*strategies, "NONE"],
        default="FULL_SHARD",
        help="NONE: not sharded at all; every rank then trains a model of its own",
    )
    parser.add_argument("--prefetch", type=int, default=1, metavar="N", help="units gathered ahead (1)")
    parser.add_argument("--communicator", default="auto", metavar="NAME", help="shm, mpi, ... (auto)")
    parser.add_argument("--loss-chunk", type=int, default=0, metavar="ROWS", help="of logits at a time (all)")
    parser.add_argument("--save", metavar="DIR", help="write the initial weights to DIR and do not train")
    options = parser.parse_args()
    with one_line(USAGE):
        config = replace(config_of(w.workload_of(options)), loss_chunk=options.loss_chunk)
        mesh = init_device_mesh("auto", communicator=options.communicator)
    run(options, config, mesh)


def config_of(workload: w.Workload) -> GPTConfig:
    return GPTConfig(
        n_layer=workload.layers,
        n_head=workload.heads,
        n_embd=workload.dim,
        block_size=workload.seq,
        vocab_size=workload.vocab,
    )


def run(options: argparse.Namespace, config: GPTConfig, mesh: DeviceMesh) -> None:
    """This rank's part."""
    workload = w.workload_of(options)
    model = GPT(config)
    if options.strategy != "NONE":
        for block in model.blocks:
            fully_shard(block, mesh=mesh, strategy=options.strategy, prefetch=options.prefetch)
        fully_shard(model, mesh=mesh, strategy=options.strategy, prefetch=options.prefetch)
    if options.weights:
        shardrt.checkpoint.load(options.weights, model)
    if options.save:
        shardrt.checkpoint.save(options.save, model)
        return
    optimizer = optim.AdamW(model.parameters(), lr=w.LEARNING_RATE, weight_decay=w.WEIGHT_DECAY)

    seconds, losses = [], []
    for step in range(options.warmup + options.steps):
        tokens, targets = workload.batch_of(step, mesh.rank)
        start = time.perf_counter()
        loss = model(tokens, targets)
        loss.backward()
        if options.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)

    ranks = gathered([*seconds[options.warmup :], w.process_peak_mb(), *losses], mesh)
    if mesh.rank == 0:
        blas = next(library for library in threadpool_info() if library["user_api"] == "blas")
        result = w.figures(
            workload,
            contestant=f"shardrt {options.strategy}",
            step_seconds=ranks[:, : options.steps].tolist(),
            peak_rss_mb=ranks[:, options.steps].tolist(),
            losses=ranks[:, options.steps + 1 :].tolist(),
            parameters=sum(parameter.size for parameter in model.parameters()),
            settings={
                "strategy": options.strategy,
                "prefetch": options.prefetch,
                "communicator": type(mesh.communicator("control")).__name__,
                "threads_per_rank": blas["num_threads"],
                "warmup": options.warmup,
                "clip": options.clip,
                "loss_chunk": options.loss_chunk,
            },
            versions={
                "shardrt": shardrt.__version__,
                # The kernels that it chose decide more than anything else here: AVX-512 or not.
                "blas": f"{blas['internal_api']} {blas['version']} {blas.get('architecture', '')}",
            },
        )
        w.show(result, options)


def gathered(values: list[float], mesh: DeviceMesh) -> np.ndarray:
    """The values of all ranks, one row each."""
    table = np.zeros((mesh.size, len(values)))
    table[mesh.rank] = values
    stream = device.current().current_stream
    mesh.communicator("control").all_gather(table.reshape(-1), stream=stream)
    stream.synchronize()
    return table


if __name__ == "__main__":
    main()
