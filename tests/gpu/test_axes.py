"""Tensor, sequence and context parallelism, and experts beside them, on the GPU as on the CPU.

Ranks are threads that share it.
"""

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard, memory_plan, set_gradient_divide_factor
from shardrt.parallel import ContextParallel, context_plan, expert_plan, parallelize_module, shard_sequence
from tests.cuda import small_gpt
from tests.gpu.test_training import near

pytestmark = pytest.mark.gpu

SIZES = {"n_layer": 1, "n_embd": 16, "block_size": 8, "vocab_size": 19, "init_std": 0.1}
MODELS = {
    "gpt": lambda: GPT(GPTConfig(n_head=2, dropout=0.2, **SIZES)),
    "llama": lambda: Llama(LlamaConfig(n_head=2, n_kv_head=1, n_hidden=16, **SIZES)),
    "mistral": lambda: Llama(LlamaConfig(n_head=2, n_kv_head=1, n_hidden=16, sliding_window=3, **SIZES)),
}
EXPERTS = LlamaConfig(1, 2, 1, 16, 16, 8, 19, init_std=0.1, qk_norm="head", experts=4, balance_loss=0.1)
PRECISIONS = (("float32", 1e-4), ("bfloat16", 3e-2))
DOCUMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8])


def two_steps(model, loss_of):
    """Losses and norms. loss_of: gets the rows of a step."""
    optimizer, seen = optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        shardrt.manual_seed(3, step=step)
        loss = loss_of(np.random.default_rng(step).integers(0, 19, (2, 9)))
        loss.backward()
        seen.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def steps_along_cp(model, mesh, starts=None):
    """Each rank has a part of each row. Memory is planned first."""
    set_gradient_divide_factor(model, 1.0)

    def part_of(rows):
        more = {} if starts is None else {"starts": starts}
        return shard_sequence(rows[:, :-1], rows[:, 1:], mesh=mesh, **more)._asdict()

    def loss_of(rows):
        return model(**part_of(rows), reduction="sum") * (1 / 16)

    part = part_of(np.zeros((2, 9), int))
    memory_plan(model, step=lambda: model(**part).backward())
    return two_steps(model, loss_of)


def alone(name, kind, precision):
    """Losses and norms, and all weights behind them."""
    mesh = init_device_mesh(name)
    shardrt.manual_seed(3)
    model = MODELS[kind]()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(precision, "float32"))
    seen = two_steps(model, lambda rows: model(rows[:, :-1], rows[:, 1:]))
    return np.concatenate([np.ravel(values) for values in (seen, *full_state_dict(model).values())])


def along_tp(name, shards, kind, sequence):
    mesh = init_device_mesh(name, (shards, 2), ("dp_shard", "tp"))
    shardrt.manual_seed(3)
    model = MODELS[kind]()
    parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
    fully_shard(model, mesh=mesh["dp_shard"])

    def loss_of(rows):
        rows = np.split(rows, shards)[mesh.rank_of("dp_shard")]
        return model(rows[:, :-1], rows[:, 1:])

    return two_steps(model, loss_of)


def along_cp(name, kind, precision):
    mesh = init_device_mesh(name, (2,), ("cp",))
    shardrt.manual_seed(3)
    model = MODELS[kind]()
    parallelize_module(model, mesh, {"blocks.*.attention": ContextParallel()})
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(precision, "float32"))
    return steps_along_cp(model, mesh, F.document_starts(DOCUMENTS))


def folded(name, sizes, sequence):
    """Experts over all ranks."""
    axes = ("dp_shard", "cp", "tp")
    mesh = init_device_mesh(name, sizes, axes)
    shardrt.manual_seed(3)
    model = Llama(EXPERTS)
    fold, data = mesh.fold("ep", mesh.size, over=axes), mesh.flat("dp_shard", "cp")
    parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
    parallelize_module(model, mesh["cp"], context_plan(model))
    parallelize_module(model, fold["ep"], expert_plan(model))
    for block in model.blocks:
        fully_shard(block.mlp.experts, mesh=fold["efsdp"])
    fully_shard(model, mesh=data)
    return steps_along_cp(model, mesh["cp"])


CASES = [  # ranks, tolerance, how
    *((1, tolerance, alone, "mistral", precision) for precision, tolerance in PRECISIONS),
    *(
        (2 * shards, 1e-4, along_tp, shards, kind, sequence)
        for kind, shards in (("gpt", 1), ("llama", 1), ("gpt", 2))
        for sequence in (False, True)
    ),
    (2, 1e-4, along_cp, "gpt", "float32"),
    *((2, 1e-4, along_cp, kind, "float32") for kind in ("llama", "mistral")),
    (2, 3e-2, along_cp, "llama", "bfloat16"),
    (2, 1e-4, folded, (1, 1, 2), False),
    (4, 1e-4, folded, (1, 2, 2), True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, [case[2].__name__, *case[3:]])))
def test_losses_and_norms_are_those_of_the_cpu(gpu, case):
    ranks, tolerance, train, *how = case
    found, expected = (thread.run(ranks, train, name, *how) for name in ("cuda", "cpu"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("variant", small_gpt.TENSOR)
def test_what_there_is_beside_it_trains_as_on_the_cpu(gpu, variant):
    ranks, settings = small_gpt.TENSOR[variant]
    found, expected = (thread.run(ranks, small_gpt.train, name, **settings) for name in ("cuda", "cpu"))
    # The gradient of a key's bias is 0 but for rounding, and AdamW takes whole steps by its sign.
    near(found, expected, 5e-2 if "16" in variant else 1e-4)
