"""What training holds is what memory_plan said before; run under mpirun.

For every two settings together, with modules that are cut over the ranks, and in stages of a pipeline; on
four ranks for each hybrid strategy beside every other setting, and in stages that are sharded;
`mpirun -n 2 python -m tests.mpi.memory shm all` for all combinations.

Every allocation that lives longer than an op is counted where it is made, and the peak of the pool of the
rest is read from the device. The plan is asked for before any of it exists.
"""

import gc
import random
import sys
import time
from itertools import cycle, product

import numpy as np

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from shardrt import activation_offload, device, nn, optim
from shardrt import functional as F
from shardrt.activation_offload import offload_activations
from shardrt.comm import CollectiveDelay, init_device_mesh
from shardrt.comm.protocol import Communicator
from shardrt.comm.shm import ShmCommunicator
from shardrt.device.cpu import CPUDevice
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    memory_plan,
    no_sync,
    set_find_unused_parameters,
    set_world_invariant,
)
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.optim.low_bit import BYTES, AdamW8bit, LionBF16
from shardrt.parallel import parallelize_module
from shardrt.parallel.memory import pipeline_plan
from shardrt.parallel.muon_memory import muon_plan
from shardrt.parallel.pipeline import Pipeline
from shardrt.recompute import checkpoint
from tests.combinations import noting, pairwise

OFFLOADS = {
    "on the device": None,
    "parameters": CPUOffloadPolicy(gradients=False, optimizer_state=False),
    "gradients": CPUOffloadPolicy(parameters=False, optimizer_state=False),
    "optimizer": CPUOffloadPolicy(parameters=False, gradients=False),
    "everything": CPUOffloadPolicy(),
    "host step": CPUOffloadPolicy(step="host"),
}
PRECISIONS = {
    "float32": None,
    "bfloat16": MixedPrecisionPolicy("bfloat16"),
    "float16, norms in float32": MixedPrecisionPolicy("float16", "float32", full_precision=(nn.LayerNorm,)),
}
QUANTISED = {
    "8 bits": MixedPrecisionPolicy(quantised=Quantisation(8, 8, host_size=1, error_feedback=True)),
    "4 bits": MixedPrecisionPolicy("bfloat16", quantised=Quantisation(4, 8, host_size=1, secondary=True)),
}
OPTIMIZERS = {  # with the number of float32 arrays that each keeps for a parameter
    "AdamW": (lambda model: optim.AdamW(model.parameters()), 2),
    "AdamW8bit": (lambda model: AdamW8bit(model.parameters()), 2 * BYTES / 4),
    "LionBF16": (lambda model: LionBF16(model.parameters()), 0.5),
    "Muon": (lambda model: optim.Muon(optim.muon_groups(model, 0.1)), 2),
}
ACCUMULATIONS = ("none", "reduce each time", "no_sync")
SAVINGS = {
    "nothing": lambda block: None,
    "recompute": checkpoint,
    "recompute but matmul": lambda block: checkpoint(block, "matmul"),
    "offload": offload_activations,
    "both": lambda block: offload_activations(checkpoint(block)),
}
MICRO_BATCHES = 4  # of a pipeline
TURNS = 4  # of a step that is added up by a tree
TOKENS = np.random.default_rng(0).integers(0, 256, (4, 64))


class Counted:
    """Bytes by place, counted as they are allocated."""

    def __init__(self):
        self.device = self.host = 0
        self._inside = False
        self._replace(CPUDevice, "buffer", self._buffer)
        self._replace(CPUDevice, "pinned", self._pinned)
        self._replace(Communicator, "allocate", self._allocate)
        self._replace(ShmCommunicator, "allocate", self._allocate)

    def _replace(self, owner, name, counting):
        original = getattr(owner, name)

        def replacement(this, *args, **kwargs):
            outer, self._inside = self._inside, True
            try:
                array = original(this, *args, **kwargs)
            finally:
                self._inside = outer
            if not outer:
                counting(this, array, **kwargs)
            return array

        setattr(owner, name, replacement)

    def _buffer(self, this, array):
        self.device += array.nbytes

    def _pinned(self, this, array):
        self.host += array.nbytes

    def _allocate(self, this, array, shared):
        self.device += array.nbytes // (this.size if shared and this.shares_memory else 1)

    def reset(self):
        self.device = self.host = 0


def freeze_matrices(model):
    """After sharding: a part of each unit is left."""
    for parameter in model.parameters():
        parameter.requires_grad = parameter.ndim == 1


def freeze_blocks(model):
    """After sharding: all of most units."""
    model.blocks.requires_grad_(False)


CHANGES = {
    "matrices frozen late": freeze_matrices,
    "blocks frozen late": freeze_blocks,
    "unused found": set_find_unused_parameters,
}


def build(
    mesh, strategy, offload="on the device", precision="float32", saving="nothing", change=None, cut=None
):
    options = {
        "strategy": strategy,
        "offload_policy": OFFLOADS[offload],
        "mp_policy": (PRECISIONS | QUANTISED)[precision],
        "mesh": mesh if cut is None else mesh["dp_shard"],
    }
    shardrt.manual_seed(1)
    model = GPT(
        GPTConfig(
            n_layer=3, n_head=2, n_embd=64, block_size=64, vocab_size=256 + (cut is not None), dropout=0.1
        )
    )
    if cut is not None:
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=cut == "sequence"))
    for block in model.blocks:
        SAVINGS[saving](block)
        fully_shard(block, **options)
    fully_shard(model, **options)
    if change is not None:
        CHANGES[change](model)
    return model


def backward_of(model, accumulation):
    """Forward and backward of a step, in two micro-batches where gradients are accumulated."""

    def micro_batch(tokens):
        cut = model.wte.weight.words is not None
        (model(tokens, tokens) if cut else F.cross_entropy(model(tokens), tokens)).backward()

    if accumulation in ("none", "few tokens"):
        micro_batch(TOKENS[:1, :8] if accumulation == "few tokens" else TOKENS)
        return
    if accumulation == "tree":
        for row in range(TURNS):
            micro_batch(TOKENS[row : row + 1])
        return
    if accumulation == "no_sync":
        with no_sync(model):
            micro_batch(TOKENS[:2])
    else:
        micro_batch(TOKENS[:2])
    micro_batch(TOKENS[2:])


def check(counted, mesh, accumulation="none", optimizer="AdamW", **choices):
    model = build(mesh, **choices)
    if accumulation == "tree":
        set_world_invariant(model, TURNS * mesh.size)
    made, states = OPTIMIZERS[optimizer]

    counted.reset()
    plan = memory_plan(model, step=lambda: backward_of(model, accumulation), optimizer_states=states)
    if optimizer == "Muon":
        plan = muon_plan(plan, model, optim.muon_groups(model, 0.1)[0]["params"])
    counted.reset()  # what the plan itself took is gone
    return measured(counted, plan, model, lambda: backward_of(model, accumulation), made)


def measured(counted, plan, model, backward, made=OPTIMIZERS["AdamW"][0]):
    """Train, and compare with the plan, to the byte. Gives what activations took."""
    gc.collect()
    for streams in activation_offload._state.__dict__.get("streams", {}).values():
        streams.pool = activation_offload.HostPool(streams.device)  # without what cases before this one took
    here = device.get("cpu")
    before = here._pool.held_bytes
    here.reset_peak()
    optimizer = made(model)
    for _ in range(2):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    planned = dict(plan.device)
    activations = planned.pop("activations")
    assert counted.device == sum(planned.values()), (counted.device, str(plan))
    assert counted.host == plan.host_bytes, (counted.host, str(plan))
    taken = here.peak_bytes() - before
    assert taken == activations, (taken, activations)
    return taken


def in_stages(mesh, schedule, per_rank=1, accumulation=MICRO_BATCHES, model="llama", **choices):
    """A model on the ranks of a pipeline."""
    options = {
        "strategy": "FULL_SHARD",
        "offload_policy": OFFLOADS[choices.get("offload", "on the device")],
        "mp_policy": PRECISIONS[choices.get("precision", "float32")],
        "mesh": mesh["dp_shard"],
    }
    shardrt.manual_seed(1)
    if model == "gpt":
        model = GPT(GPTConfig(n_layer=6, n_head=2, n_embd=64, block_size=64, vocab_size=512, dropout=0.1))
    else:
        model = Llama(LlamaConfig(6, 2, 2, 64, 128, 64, 512, tied=choices.get("tied", False)))
    for block in model.blocks:
        SAVINGS[choices.get("saving", "nothing")](block)
    pipeline = Pipeline(
        model, mesh["pp"], schedule=schedule, micro_batches=accumulation, stages_per_rank=per_rank
    )
    for stage in pipeline.stages:
        for module in (*stage.blocks, stage):
            fully_shard(module, **options)
    return pipeline


def check_stages(counted, mesh, schedule, **choices):
    pipeline = in_stages(mesh, schedule, **choices)
    count = pipeline.table.micro_batches
    batches = np.split(np.tile(TOKENS, (max(2, count // 2), 1)), count)
    step = {"loss": lambda loss, _: loss, "batches": batches, "inputs": lambda tokens: (tokens, tokens)}
    counted.reset()
    plan = pipeline_plan(pipeline, **step)
    counted.reset()
    return measured(counted, plan, pipeline.model, lambda: pipeline.step(**step))


def any_two(strategies, choose):
    """Settings of which any two are together, or all; and sums by a tree in each strategy."""
    names = ("strategy", "offload", "precision", "accumulation", "change")
    rows = choose(strategies, OFFLOADS, PRECISIONS, ACCUMULATIONS, (None, *CHANGES))
    for row, saving in zip(rows, cycle(SAVINGS), strict=False):
        yield dict(zip(names, row, strict=True)) | {"saving": saving}
    for strategy, precision in zip(strategies, cycle(PRECISIONS), strict=False):
        yield {"strategy": strategy, "precision": precision, "accumulation": "tree"}


def cut_in_modules():
    """Each way to cut them beside every other setting."""
    savings, precisions, accumulations = cycle(SAVINGS), cycle(PRECISIONS), cycle(ACCUMULATIONS)
    for cut, offload in product(("tensor", "sequence"), OFFLOADS):
        rest = {"precision": next(precisions), "accumulation": next(accumulations)}
        yield {"strategy": "FULL_SHARD", "cut": cut, "offload": offload, "saving": next(savings), **rest}
    yield {"strategy": "FULL_SHARD", "cut": "tensor", "optimizer": "Muon", "accumulation": "few tokens"}


STAGED = [
    {"schedule": "GPipe"},
    {"schedule": "1F1B", "saving": "recompute", "tied": True},
    {"schedule": "1F1B", "accumulation": 1, "precision": "bfloat16"},
    {"schedule": "Interleaved1F1B", "per_rank": 2, "offload": "everything"},
    {"schedule": "ZB-H1", "saving": "both", "precision": "bfloat16"},
    {"schedule": "ZBVZeroBubble", "per_rank": 2, "offload": "gradients"},
    {"schedule": "DualPipeV", "per_rank": 2},
]
LATE = {"schedule": "1F1B", "model": "gpt"}, {"schedule": "ZB-H1"}  # whenever messages come
IN_FOUR = [
    {"schedule": "1F1B", "accumulation": 8, "model": "gpt"},
    {"schedule": "ZB-H1", "accumulation": 8},
    {"schedule": "ZBVZeroBubble", "per_rank": 2, "accumulation": 8, "model": "gpt"},
]


def late(made):
    """Each of its calls is late, by times that are never the same."""
    return CollectiveDelay(made, 0.0, lambda *_: time.sleep(random.choice((0, 1e-4, 5e-3))))


IN_STAGES = {  # by the number of ranks: meshes, what their communicators are wrapped in, and cases
    2: [((2, 1), None, STAGED), ((2, 1), late, LATE)],
    4: [((2, 2), None, STAGED[::2]), ((4, 1), None, IN_FOUR)],
}


def each_strategy(strategies):
    """Each beside every other setting."""
    precisions, accumulations, changes = cycle(PRECISIONS), cycle(ACCUMULATIONS), cycle((None, *CHANGES))
    for strategy in strategies:
        for offload in OFFLOADS:
            rest = {"accumulation": next(accumulations), "change": next(changes)}
            yield {"strategy": strategy, "offload": offload, "precision": next(precisions), **rest}
        yield {"strategy": strategy, "precision": next(precisions), "accumulation": "tree"}


def low_and_apart():
    """Optimizers with small or whole state, and collectives in few bits."""
    for strategy, optimizer, precision, accumulation in (
        ("FULL_SHARD", "Muon", "8 bits", "few tokens"),  # of which Muon's step takes more than backward
        ("NO_SHARD", "Muon", "bfloat16", "few tokens"),
        ("FULL_SHARD", "AdamW8bit", "4 bits", "none"),
        ("SHARD_GRAD_OP", "AdamW8bit", "8 bits", "no_sync"),
        ("SHARD_OPT", "LionBF16", "4 bits", "reduce each time"),
    ):
        how = {"precision": precision, "accumulation": accumulation}
        yield {"strategy": strategy, "optimizer": optimizer, **how}


def main(backend, combinations="pairs"):
    counted = Counted()
    mesh = init_device_mesh("auto", communicator=backend)
    if mesh.size == 4:
        pairs, of_mpi = (init_device_mesh("auto", (2, 2), communicator=kind) for kind in (backend, "mpi"))
        hybrids = [*each_strategy(("HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP"))]
        # Few over MPI: its ranks keep a core while they wait.
        cases = [*((pairs, case) for case in hybrids), *((of_mpi, case) for case in hybrids[::6])]
    else:
        choose = product if combinations == "all" else pairwise
        axes = init_device_mesh("auto", (1, 2), ("dp_shard", "tp"), communicator=backend)
        flat = [*low_and_apart(), *any_two(("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD"), choose)]
        cases = [*((mesh, case) for case in flat), *((axes, case) for case in cut_in_modules())]
    gc.collect()
    gc.freeze()  # modules: to look at them again for each case takes as long as the case
    taken = []
    for on, case in cases:
        with noting(case):
            taken.append(check(counted, on, **case))
    for shape, wrap, staged in IN_STAGES[mesh.size]:
        piped = init_device_mesh("auto", shape, ("pp", "dp_shard"), communicator=backend, wrap=wrap)
        for case in staged:
            with noting(case):
                taken.append(check_stages(counted, piped, **case))
    if mesh.rank == 0:
        print(f"{len(taken)} as planned; activations took {min(taken)} to {max(taken)} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
