"""What can't be a pipeline is refused when it is asked for, by one line that says what and where."""

from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import pytest

import shardrt
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard, set_world_invariant
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import expert_plan, parallelize_module
from shardrt.parallel.memory import pipeline_plan
from shardrt.parallel.pipeline import Pipeline
from shardrt.parallel.schedules import schedule
from shardrt.parallel.table import Action, Table
from shardrt.recompute import checkpoint
from tests import lab
from tests.parallel.piped import SMALL, Nests, batches_of, build, gpt, llama, loss_of
from tests.ranks import run_ranks


def mesh_of_two():
    return init_device_mesh("cpu", (2, 1, 1), ("pp", "dp_shard", "tp"))


def piped(make=llama, **how):
    return Pipeline(make(), mesh_of_two()["pp"], **how)


def read(text):
    with NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(text)
        file.flush()
        return Table.load(Path(file.name))


ONE, TWO = "0F0,0B0\n", "0F0,0B0\n1F0,1B0\n"  # ranks with a stage each, and one micro-batch
test_settings_and_tables_that_do_not_fit = lab.refusals(
    (lambda: piped(cuts=[1, 2]), "the table has 2 stages, cuts make 3"),
    (lambda: piped(stages_per_rank=2), "1F1B: stages per rank must be 1, got 2"),
    (lambda: piped(schedule="2F2B"), "unknown schedule '2F2B'; known: GPipe, 1F1B"),
    (lambda: piped(schedule=read(ONE)), r"the table has 1 ranks, DeviceMesh\('cpu', \(2,\)"),
    (lambda: piped(schedule=read(TWO), micro_batches=2), "has 1 micro-batches, micro_batches says 2"),
    (lambda: piped(schedule=read(TWO), stages_per_rank=2), "has 2 stages, stages_per_rank makes 4"),
    (lambda: piped(schedule=read("0F0\n1F0,1B0\n")), "its row ends without I of stage 0 for micro-batch 0"),
    (
        lambda: piped(schedule=("GPipe", "1F1B")[init_device_mesh("cpu").rank]),
        r"ranks \[1\] of .* passed another schedule than rank 0",
    ),
    (lambda: Pipeline(llama(), "pp"), TypeError, "mesh must be"),
    (lambda: piped(schedule=3), TypeError, "schedule must be"),
    (lambda: piped(lambda: nn.Linear(2, 2)), TypeError, r"pieces\(\)"),
    (lambda: piped(lambda: 3), TypeError, "model must be"),
    (lambda: Pipeline(llama(), mesh_of_two()), 'mesh must have one axis, as mesh."pp".'),
    ranks=2,
    everywhere=True,
)


def losses(*rows):
    """(loss function, inputs, exception, words)."""

    def attempt(loss, inputs):
        pipeline, data = build((2, 1, 1), "1F1B", sharded=False)
        pipeline.step(loss, batches_of(0, data), inputs=inputs)

    made = [(partial(attempt, loss, inputs), kind, words) for loss, inputs, kind, words in rows]
    return lab.refusals(*made, ranks=2, literal=True)


test_loss_functions = losses(
    (
        lambda logits, batch: logits,
        lambda batch: {"tokens": batch["tokens"]},
        TypeError,
        "must return a scalar tensor, got [4, 4, 11]",
    ),
    (lambda loss, batch: loss.item(), None, TypeError, "must return a scalar tensor, got float"),
    (
        lambda loss, batch: loss.detach(),
        None,
        RuntimeError,
        "this tensor depends on nothing that requires a gradient",
    ),
    (
        loss_of,
        lambda batch: {"tokens": batch["tokens"], "target": 1},
        TypeError,
        "Llama.forward: got an unexpected keyword argument 'target'",
    ),
    (
        loss_of,
        lambda batch: batch["tokens"],
        TypeError,
        "Pipeline.step: inputs gave ndarray; the model is called with a tuple, or a mapping from names",
    ),
)


def step(pipeline, count=2):
    pipeline.step(loss_of, batches_of(0, pipeline.mesh.root["dp_shard"])[:count])


def another_number_of_batches():
    step(piped(), count=3)


def hooks_of_the_whole():
    pipeline = piped()
    pipeline.model.register_forward_hook(lambda *args: None)
    step(pipeline)


def shard_over_the_stages():
    pipeline = piped()
    fully_shard(pipeline.stages[0], mesh=pipeline.mesh)


def shard_one_stage():
    pipeline = piped()
    for stage in pipeline.stages:
        if stage.last:
            fully_shard(stage, mesh=pipeline.mesh.root["dp_shard"])
    step(pipeline)


def recompute_the_whole():
    pipeline = piped()
    checkpoint(pipeline.model)
    step(pipeline)


def a_set_for_the_next_stage():
    class Sets(Nests):
        def pieces(self):
            first, *others = super().pieces()
            return [nn.Piece("first", lambda x, batch: {shardrt.Tensor([1.0])}, first.uses), *others]

    pipeline = piped(Sets, cuts=[1])
    pipeline.step(lambda logits, batch: logits.sum(), [{"tokens": np.ones((1, 2), int)}] * 2)


def optimizer_before_sharding():
    pipeline = piped()
    optimizer = optim.AdamW(pipeline.model.parameters())
    assert optimizer and fully_shard(pipeline.stages[0], mesh=pipeline.mesh.root["dp_shard"])


def update_what_is_tied_in_backward():
    pipeline, data = build((2, 1, 1), "1F1B", make=gpt)
    optimizer = optim.AdamW(pipeline.model.parameters(), in_backward=True)
    assert optimizer.in_backward and pipeline.step(loss_of, batches_of(0, data))


def late_in_a_tree():
    pipeline, data = build((2, 1, 1), "ZB-H1")
    set_world_invariant(pipeline.model, 4)
    pipeline.step(loss_of, batches_of(0, data))


test_calls = lab.refusals(
    (another_number_of_batches, "the table has 2 micro-batches, got 3"),
    (hooks_of_the_whole, RuntimeError, "Llama has forward hooks, which no stage would call"),
    (shard_over_the_stages, "along 'pp' of .* ranks have other parts of the model"),
    (shard_one_stage, "stage 0 is not sharded, but others are; call fully_shard on each stage"),
    (recompute_the_whole, RuntimeError, "Llama is recomputed or offloaded as a whole"),
    (
        a_set_for_the_next_stage,
        TypeError,
        "stage 0 gives set to the next; it can be a tensor, or tuples",
    ),
    (optimizer_before_sharding, RuntimeError, "already belongs to an optimizer; make the optimizer after"),
    (update_what_is_tied_in_backward, RuntimeError, "sum_tied: the optimizer has in_backward=True"),
    (late_in_a_tree, "this table defers weight gradients; use GPipe, 1F1B or Interleaved1F1B"),
    ranks=2,
)


NONSENSE = [  # what is called with it, and the words of the one line
    (lambda p: schedule(None, 2, 4), "schedule: name must be a string, got NoneType"),
    (lambda p: schedule("1F1B", 2.0, 4), "1F1B: the number of ranks must be an integer, got 2.0"),
    (lambda p: schedule("GPipe", 2, "4"), "GPipe: the number of micro-batches must be an integer, got '4'"),
    (lambda p: schedule("1F1B", 2, 10**9), "1F1B: 2 ranks, 1000000000 micro-batches .* too large a table"),
    (lambda p: Table(None, 2, 2).check(), "the table's ranks must be tuples of Actions"),
    (lambda p: Table(((("F", 0, 0, False),),), 1, 1).check(), "the table's ranks must be tuples of Actions"),
    (lambda p: Table(p.table.ranks, "2", 2).check(), "the table's stages must be an integer, got '2'"),
    (
        lambda p: Table(((Action("F", "a", 0),),), 1, 1).check(),
        "rank 0, action 0: stage and micro-batch must",
    ),
    (
        lambda p: p.table.replay("x"),
        "a cost must be one number of at least 0, or 2 of them, one per stage; got x",
    ),
    (lambda p: p.table.replay(float("nan")), "a cost must be one number of at least 0"),
    (lambda p: piped(cuts=2), "Pipeline: cuts must be pieces, got 2"),
    (lambda p: piped(cuts="blocks.1"), "Pipeline: cuts must be pieces, got 'blocks.1'"),
    (lambda p: piped(costs=None), "costs must be 'parameters', 'time' or numbers, got None"),
    (lambda p: piped(costs=["1"] * 4), "costs must be numbers, got ['1', "),
    (lambda p: piped(costs="time", batch=[1]), "batch must be the arguments of forward by name, got list"),
    (lambda p: piped(costs="time", batch={}), "batch: Llama.forward: missing a required argument: 'tokens'"),
    (lambda p: p.step(None, []), "Pipeline.step: loss must be a function, got NoneType"),
    (lambda p: p.step(loss_of, [], inputs=1), "Pipeline.step: inputs must be a function, got int"),
    (lambda p: p.step(loss_of, [[]] * 2), "without inputs=, a micro-batch is list; the model is called with"),
    (lambda p: p.step(loss_of, None), "Pipeline.step: batches must be a list of micro-batches, got None"),
    (
        lambda p: pipeline_plan(p.model, loss_of, []),
        "expected a Pipeline and a function, got Llama and funct",
    ),
]


test_nonsense_is_told_in_a_line_that_names_it = lab.refusals(
    *(
        (lambda call=call: call(piped()), (TypeError, ValueError), words.replace("[", r"\["))
        for call, words in NONSENSE
    ),
    ranks=2,
    everywhere=True,
)


def test_a_step_after_one_that_has_raised():
    """One rank goes on with what it has; several do not know what the others have had."""

    def raises(batch):
        raise KeyError("data")

    def norm(size):
        pipeline, data = build((size, 1, 1), "ZB-H1")
        with pytest.raises(KeyError):
            pipeline.step(loss_of, batches_of(0, data), inputs=raises)
        pipeline.step(loss_of, batches_of(0, data))
        return clip_grad_norm_(pipeline.model.parameters(), 1.0)

    def without():
        pipeline, data = build((1, 1, 1), "ZB-H1")
        pipeline.step(loss_of, batches_of(0, data))
        return clip_grad_norm_(pipeline.model.parameters(), 1.0)

    assert run_ranks(1, norm, 1) == run_ranks(1, without)
    with pytest.raises(RuntimeError, match="an earlier step raised on this rank"):
        run_ranks(2, norm, 2)


def mixtures():
    return Llama(LlamaConfig(**SMALL, n_kv_head=1, n_hidden=8, experts=2))


def along_stages(pp):
    """What would make a stage wait for the ranks of another one: (model, what is done to it)."""
    yield llama(), lambda model: parallelize_module(model, pp, plan_of(model))
    yield mixtures(), lambda model: parallelize_module(model, pp.fold("ep", 2)["ep"], expert_plan(model))
    yield mixtures(), lambda model: nn.balance_over(model, pp)


@lab.on_ranks(2)
def test_nothing_is_cut_or_balanced_along_the_axis_of_the_stages():
    pp = mesh_of_two()["pp"]
    for model, done in along_stages(pp):
        done(model)
        with pytest.raises(ValueError, match="which overlaps the stages' axis: use axes"):
            Pipeline(model, pp)
    model = mixtures()
    Pipeline(model, pp)
    with pytest.raises(
        ValueError, match="'blocks.0.mlp.router' is on one pipeline stage, but .* has ranks of other stages"
    ):
        nn.balance_over(model, pp)
