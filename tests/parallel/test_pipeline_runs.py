"""What a program does around steps of a pipeline: evaluation, files, checkpoints, tables, other models."""

import gc
import weakref
from collections import Counter
from functools import partial

import numpy as np
import pytest

import shardrt
from models.cache import KVCache
from models.sampling import continued, greedy
from shardrt import device, nn, no_grad, optim
from shardrt import functional as F
from shardrt.checkpoint import CheckpointManager, full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.faults.failure import PeerFailed
from shardrt.fsdp import memory_plan, units
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel.memory import pipeline_plan
from shardrt.parallel.pipeline import Pipeline
from shardrt.parallel.schedules import schedule as table_of_name
from shardrt.parallel.table import Table
from shardrt.recompute import checkpoint_blocks
from tests import lab
from tests.parallel.piped import (
    MICRO_BATCHES,
    NAMES,
    TIME,
    VOCAB,
    Batch,
    InPieces,
    Nests,
    Whole,
    batches_of,
    build,
    gpt,
    like_one_piece,
    llama,
    long_llama,
    loss_of,
    picture_batches,
    picture_inputs,
    picture_loss,
    pictures,
    run,
    token_inputs,
    token_loss,
    trained,
    vit,
)
from tests.ranks import run_ranks


def test_batches_may_be_of_any_kind_and_of_any_shapes():
    """Other shapes in the same step, and in the next."""

    def norms(pipeline, data):
        found = []
        for step, kind in enumerate((dict, list, Batch, shardrt.Tensor)):
            batches = []
            for number in range(MICRO_BATCHES):
                shape = 1 + (number + step) % 3, TIME - number % 2
                rows = np.random.default_rng([step, number]).integers(0, VOCAB, (shape[0], shape[1] + 1))
                batches.append(Batch(rows[:, :-1], rows[:, 1:]))
            ways = {dict: Batch._asdict, list: list, Batch: Batch._make}
            batches = [ways[kind](b) if kind in ways else Batch(*map(kind, b)) for b in batches]
            pipeline.step(lambda loss, _: loss, batches, inputs=tuple if kind is list else None)
            found.append(clip_grad_norm_(pipeline.model.parameters(), 1.0))
        return found

    like_one_piece(norms, "GPipe", "ZB-H1", "Interleaved1F1B")


def test_evaluation_gives_every_rank_what_the_model_gives():
    """Also while dropout acts, and then the step after it draws what it draws after such a forward."""

    def outputs(pipeline, data):
        model, (images, _), found = pipeline.model, pictures(), []
        for training in (True, False):
            shardrt.manual_seed(3, step=5)
            model.train(training)
            with no_grad():
                found.append(pipeline(shardrt.Tensor(images)).numpy())
                found.append(pipeline(images=shardrt.Tensor(images[:3])).numpy())
            model.train()
            pipeline.step(picture_loss, picture_batches(), inputs=picture_inputs)
            found.append(clip_grad_norm_(model.parameters(), np.inf))
        return found

    like_one_piece(outputs, "1F1B", "Interleaved1F1B", how={"make": vit})


@pytest.mark.parametrize("make", [llama, gpt])
def test_generation_keeps_what_was_read_on_each_stage(make):
    def written(pipeline, data):
        pipeline.model.eval()
        net = pipeline.model if isinstance(pipeline, Whole) else pipeline
        beyond = continued(net, np.array([[1, 2], [3, 4]]), 5, greedy, block_size=TIME)  # the window moves
        with no_grad():
            cache = KVCache(2, TIME)
            return [beyond, *(pipeline(np.array([t]), cache=cache).numpy() for t in ([1, 2, 3], [4]))]

    like_one_piece(written, "1F1B", "Interleaved1F1B", axes=(2, 1, 2), how={"make": make})


def test_hooks_are_called_as_in_one_piece():
    def calls(pipeline, data):
        model, found = pipeline.model, []

        def sees_a_tensor(module, args, output):
            output = output * 1
            output.register_hook(lambda gradient: found.append(("tensor", float(np.abs(gradient).sum()))))
            return output

        model.blocks[1].register_forward_hook(sees_a_tensor)
        for name, parameter in model.named_parameters():
            message = partial(lambda name, p: found.append((name, float(np.abs(p.grad).sum()))), name)
            parameter.register_post_accumulate_grad_hook(message)
        for number, block in enumerate(model.blocks):
            message = partial(lambda number, *args: found.append((f"block {number}", len(args))), number)
            block.register_forward_pre_hook(message)
            block.register_forward_hook(message)
        pipeline.step(loss_of, batches_of(0, data))
        return found

    expected = Counter(run((1, 1, 1), None, calls)[0])
    for schedule in ("1F1B", "ZB-H1"):
        assert Counter(sum(run((2, 1, 1), schedule, calls), [])) == expected


RUNS = {"none": ((1, 1, 1), None), "v": ((2, 1, 1), "ZBVZeroBubble"), "three": ((3, 1, 1), "ZB-H1")}


def continued_run(folder, axes, schedule, begin, end):
    pipeline, data = build(axes, schedule)
    model = pipeline.model
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    manager = CheckpointManager(folder, model, optimizer, data.root)
    if begin:
        manager.restore()
    for step in range(begin, end):
        pipeline.step(loss_of, batches_of(step, data))
        lab.update(optimizer)
    if not begin:
        manager.save(end)
    return full_state_dict(model)


def test_a_run_goes_on_with_any_other_stages(tmp_path):
    expected = run_ranks(1, continued_run, tmp_path / "whole", (1, 1, 1), None, 0, 4)[0]
    for (name, (axes, schedule)), after in zip(RUNS.items(), [*list(RUNS)[1:], "none"], strict=True):
        folder, (other, then) = tmp_path / name, RUNS[after]
        run_ranks(int(np.prod(axes)), continued_run, folder, axes, schedule, 0, 2)
        found = run_ranks(int(np.prod(other)), continued_run, folder, other, then, 2, 4)[0]
        np.testing.assert_equal(found, expected, err_msg=f"{name}, then {after}")


def test_a_table_of_ones_own_gathers_and_releases_where_it_says(tmp_path):
    """Rows of PyTorch's notation; a stage that is not sharded has nothing to gather."""
    rows = [line.split(",") for line in str(table_of_name("1F1B", 2, MICRO_BATCHES)).splitlines()]
    rows = [
        [f"{r}UNSHARD", row[0], f"{r}RESHARD", f"{r}UNSHARD", *row[1:], f"{r}RESHARD"]
        for r, row in enumerate(rows)
    ]
    (tmp_path / "mine.csv").write_text("\n".join(map(",".join, rows)))
    table = Table.load(tmp_path / "mine.csv")

    def states(pipeline, data):
        pipeline.step(loss_of, batches_of(0, data))
        return {unit.state.name for stage in pipeline.stages for unit in units(stage)}

    assert run((2, 1, 2), "1F1B", states) == [{"KEPT"}] * 4
    assert run((2, 1, 2), table, states) == [{"SHARDED"}] * 4
    lab.assert_equal(trained((2, 1, 2), table), trained((1, 1, 2), None))
    lab.assert_equal(trained((2, 1, 1), table, sharded=False), trained((1, 1, 1), None, sharded=False))


def test_nests_of_tensors_go_from_stage_to_stage():
    def found(pipeline, data):
        batches = batches_of(0, data)
        pipeline.step(token_loss, batches, inputs=token_inputs)
        with no_grad():
            logits = pipeline(batches[0]["tokens"]).numpy()
        return clip_grad_norm_(pipeline.model.parameters(), 1.0), logits

    like_one_piece(found, "1F1B", "Interleaved1F1B", "ZBVZeroBubble", how={"make": Nests})
    like_one_piece(found, "ZB-H1", axes=(4, 1, 1), how={"make": Nests})


class Drops(InPieces):
    """One dropout for all of its layers, and one function that all call, of no module at all."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, VOCAB)

    def pieces(self):
        def block(number, x, batch):
            x = self.dropout(F.relu(self.blocks[number](x)))
            return x if number == 1 else F.dropout(x, 0.3, self.training)

        return [
            nn.Piece("first", lambda x, batch: self.embedding(batch["tokens"]), (self.embedding,)),
            *(nn.Piece(layer.name, partial(block, n), (layer,)) for n, layer in enumerate(self.blocks)),
            nn.Piece("last", lambda x, batch: self.head(x), (self.head,)),
        ]


def test_one_dropout_of_several_stages_draws_masks_of_its_own_in_each():
    def found(pipeline, data):
        model, logits = pipeline.model, []
        batches = batches_of(0, data)
        for training in (True, False, True):
            model.train(training)
            pipeline.step(token_loss, batches, inputs=token_inputs)
            with no_grad():
                logits.append(pipeline(batches[0]["tokens"]).numpy())
            shardrt.manual_seed(3, step=len(logits))  # an evaluation draws nothing, and is no call
        return clip_grad_norm_(model.parameters(), 1.0), logits

    like_one_piece(found, "1F1B", "Interleaved1F1B", how={"make": Drops})
    like_one_piece(
        found, "ZB-H1", how={"make": Drops, "first": lambda model: checkpoint_blocks(model.blocks)}
    )


class TwiceTied(InPieces):
    """The words and a layer, which the second half uses in the other order."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def pieces(self):
        first, second = self.blocks
        return [
            nn.Piece("words", lambda x, batch: self.words(batch["tokens"]), (self.words,)),
            nn.Piece("first", lambda x, batch: F.relu(first(x)), (first,)),
            nn.Piece("second", lambda x, batch: F.relu(second(first(x))), (second,), tied=(first,)),
            nn.Piece("head", lambda x, batch: x @ self.words.weight.transpose(0, 1), tied=(self.words,)),
        ]


def test_stages_may_have_what_is_tied_in_another_order():
    def final(pipeline, data):
        def step(number):
            pipeline.step(token_loss, batches_of(number, data), inputs=token_inputs)

        return lab.learn(pipeline.model, step, whole=None)

    expected = run((1, 1, 2), None, final, make=TwiceTied)[0]
    for schedule, cuts in (("ZB-H1", (2,)), ("ZBVZeroBubble", (1, 2, 3))):
        found = run((2, 1, 2), schedule, final, make=TwiceTied, cuts=cuts)[0]
        lab.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_plan_is_made_before_and_after_steps_and_of_as_many_batches():
    def plans(pipeline, data):
        loss = partial(loss_of)
        before = pipeline_plan(pipeline, loss, batches_of(0, data))
        pipeline.step(loss, batches_of(0, data))
        with pytest.raises(ValueError, match="pipeline_plan: the table has 4 micro-batches, got 3"):
            pipeline_plan(pipeline, loss, batches_of(0, data)[:3])
        return before == pipeline_plan(pipeline, loss, batches_of(0, data))

    assert all(run((2, 1, 1), "1F1B", plans))


def test_a_forward_that_raises_on_one_rank_ends_on_the_others(monkeypatch):
    """Also where that rank catches it, and goes on to what the others do not come to."""

    def attempt(pipeline, data):
        tokens = batches_of(0, data)[0]["tokens"]
        pipeline(tokens)
        monkeypatch.setattr(thread, "_PATIENCE", 1.0)
        if pipeline.last:
            pipeline.stages[-1].pieces[-1] = nn.Piece("head", lambda x, batch: 1 / 0)
        with pytest.raises((ZeroDivisionError, PeerFailed)) as raised:
            pipeline(tokens)
        with pytest.raises(RuntimeError, match="an earlier step raised on this rank"):
            pipeline.step(loss_of, batches_of(0, data))
        return raised.type

    assert run((2, 1, 1), "1F1B", attempt) == [PeerFailed, ZeroDivisionError]


def test_a_memory_plan_runs_a_step_of_the_stages_dry():
    """Untied and tied; and leaves the step that follows as it was."""

    def norm(pipeline, data, plans=True):
        if plans:
            message = memory_plan(pipeline.model, step=lambda: pipeline.step(loss_of, batches_of(0, data)))
            own = 4 * sum(p.size for p in pipeline.model.parameters() if not p.absent)
            assert own <= message.device["sharded parameters"] <= 1.1 * own
        pipeline.step(loss_of, batches_of(0, data))
        return clip_grad_norm_(pipeline.model.parameters(), 1.0)

    for make in (llama, gpt):
        first = run((2, 1, 1), "ZB-H1", partial(norm, plans=False), make=make)
        assert run((2, 1, 1), "ZB-H1", norm, make=make) == first


def test_two_models_on_one_mesh_do_not_disturb_each_other():
    def norms(first, second):
        mesh = init_device_mesh("cpu", (2, 1, 1), NAMES[:3])
        pipelines = []
        for number in range(2):
            shardrt.manual_seed(3 + number)
            kind = ("1F1B", "ZB-H1")[number]
            pipelines.append(Pipeline(llama(), mesh["pp"], schedule=kind, micro_batches=4))
        for pipeline in pipelines[first:second]:
            pipeline.step(loss_of, batches_of(0, mesh["dp_shard"]))
        return [clip_grad_norm_(p.model.parameters(), 1.0) for p in pipelines[first:second]]

    both = run_ranks(2, norms, 0, 2)
    assert both == [x + y for x, y in zip(run_ranks(2, norms, 0, 1), run_ranks(2, norms, 1, 2), strict=True)]


def test_steps_hold_no_more_than_one_and_1f1b_less_than_gpipe():
    def bytes_of_steps(pipeline, data):
        """(held after each step, at most in it) on the device that both ranks are on."""
        rows = np.random.default_rng(0).integers(0, VOCAB, (8, 2, 65))
        batches = [{"tokens": part[:, :-1], "targets": part[:, 1:], "reduction": "sum"} for part in rows]
        control, here, found = data.root.communicator("control"), device.current(), []
        for _ in range(3):
            control.barrier(stream=here.current_stream)
            here.reset_peak()
            control.barrier(stream=here.current_stream)
            pipeline.step(loss_of, batches)
            control.barrier(stream=here.current_stream)
            most = here.peak_bytes()
            control.barrier(stream=here.current_stream)
            gc.collect()
            here.reset_peak()
            found.append((here.peak_bytes(), most))
        return found

    found = {
        schedule: run((2, 1, 1), schedule, bytes_of_steps, make=long_llama, sharded=False, micro_batches=8)
        for schedule in ("GPipe", "1F1B", "ZB-H1")
    }

    for ranks, _ in found.values():
        assert ranks[2][0] <= ranks[1][0]
    most = {schedule: max(most for _, most in ranks[0]) for schedule, ranks in found.items()}
    assert most["1F1B"] < 0.5 * most["GPipe"]


def test_a_step_leaves_nothing_that_only_a_collection_frees():
    """Its batches and losses are memory of the device, and how much is held would be left to chance."""

    class Batch(dict):
        pass

    def kept_after_a_step(pipeline, _data):
        rows = np.random.default_rng(0).integers(0, VOCAB, (4, 2, 5))
        batches = [Batch(tokens=part[:, :-1], targets=part[:, 1:], reduction="sum") for part in rows]
        there = [weakref.ref(batch) for batch in batches]
        pipeline.step(loss_of, batches)
        batches.clear()
        return sum(batch() is not None for batch in there)

    gc.disable()
    try:
        found = run((2, 1, 1), "1F1B", kept_after_a_step, sharded=False, micro_batches=4)
    finally:
        gc.enable()
    assert found == [0, 0]
