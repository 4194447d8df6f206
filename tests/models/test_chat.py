"""models/chat.py: answers are learnt, packing changes no loss, and ranks and micro-batches change no mean."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shardrt
from models import generate, train
from models.gpt import GPT, GPTConfig
from models.hub import load_pretrained, save_pretrained
from models.language import GPTRecipe, LlamaRecipe, TextConfig
from models.llama import Llama, LlamaConfig
from shardrt.__main__ import main
from shardrt.comm import thread
from shardrt.train import config as settings
from shardrt.train.held_out import IGNORED
from shardrt.train.job import launch
from tests.lab import jobs, talks
from tests.lab.jobs import records, refused, weights
from tests.lab.talks import said, write
from tests.train.plain import leave_out

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SUMS = [said(f"{NUMBERS[a]} plus {NUMBERS[b]}", NUMBERS[a + b]) for a in range(5) for b in range(5)]
MIXED = [*talks.CONVERSATIONS, *SUMS[:18:2], said("one", "two three four five six seven " * 3)]
SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 96, "vocab_size": 320, "init_std": 0.2}
MODELS = {
    "llama": lambda: Llama(LlamaConfig(**SHAPE, n_kv_head=2, n_hidden=48)),
    "gpt": lambda: GPT(GPTConfig(**SHAPE)),
}


@pytest.fixture(scope="module", autouse=True)
def plain_runs():
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch.setattr)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models of random weights that have a chat template, and conversations."""
    folder = tmp_path_factory.mktemp("chat")
    for name, made in MODELS.items():
        shardrt.manual_seed(3)
        save_pretrained(made(), folder / name)
        talks.furnish(folder / name)
    write(folder / "sums.jsonl", SUMS)
    write(folder / "mixed.jsonl", MIXED)
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def recipe(kind="llama", **changes):
    own = {"llama": LlamaRecipe, "gpt": GPTRecipe}[kind]
    given = {
        "init_from": Path(kind),
        "data": (Path("mixed.jsonl"),),
        "text": TextConfig(chat=True),
        "steps": 3,
        "batch_size": 4,
        "optimizer": settings.OptimizerConfig(lr=1e-3, warmup_steps=0),
        "report": settings.ReportConfig(log_interval=1, eval_interval=3),
        "sample": settings.SampleConfig(length=0),
    }
    return own(**given | changes)


def run(ranks, name, **changes):
    thread.run(ranks, launch, recipe(name=name, **changes))


# --- packing changes nothing ---


def examples_of(task):
    """(tokens, targets) of each example that a task trains on, one at a time."""
    for row in range(len(task.train)):
        tokens, targets, documents = task.train.rows([row])
        for number in range(documents.max() + 1):
            inside = documents[0] == number
            if (targets[0, inside] != IGNORED).any():
                yield tokens[:, inside], targets[:, inside]


@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_and_gradients_of_packed_examples_are_those_of_each_alone(kind):
    """Turned positions are relative; those of a GPT begin again."""
    task = recipe(kind).task()
    batch = task.batch(range(len(task.train)))
    found = []
    for parts in ([task.inputs(batch)], [{"tokens": t, "targets": y} for t, y in examples_of(task)]):
        model = load_pretrained(kind)
        losses = [model(**part | {"reduction": "sum"}) for part in parts]
        for loss in losses:
            loss.backward()
        gradients = {name: np.array(p.grad) for name, p in model.named_parameters()}
        found.append((len(losses), sum(map(float, losses)), gradients))
    (_, packed, gradients), (examples, alone, expected) = found
    assert examples > batch.tokens.shape[0] and packed == pytest.approx(alone, rel=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], atol=2e-5 * np.abs(expected[name]).max())


def test_the_loss_of_the_first_step_is_that_of_transformers_on_labels(folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run(2, "first", steps=1)
    task = recipe().task()
    windows = task.train.numbers(range(4), 0)
    theirs = transformers.LlamaForCausalLM.from_pretrained("llama", dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained("llama")
    chosen = [n for n in range(len(MIXED)) if n % 20 != 19 and n != len(MIXED) - 1]
    total, count, seen = 0.0, 0, 0
    for window in windows:
        inside = task.train._order[task.train._borders[window] : task.train._borders[window + 1]]
        for number in inside:
            messages, place = MIXED[chosen[number]]["messages"], 0
            ids = tokenizer.apply_chat_template(messages, return_dict=False)
            labels = [-100] * len(ids)
            for k, message in enumerate(messages):
                if message["role"] == "assistant":
                    how = {"return_dict": False, "add_generation_prompt": True}
                    place = len(tokenizer.apply_chat_template(messages[:k], **how))
                    end = place + ids[place:].index(tokenizer.eos_token_id) + 1
                    labels[place:end] = ids[place:end]
            ids, labels = torch.tensor([ids[:97]]), torch.tensor([labels[:97]])
            with torch.no_grad():
                answers = int((labels[:, 1:] != -100).sum())
                total += float(theirs(ids, labels=labels).loss) * answers
            count, seen = count + answers, seen + 1
    assert seen > 4
    assert records(folder, "first", "step")[0]["loss"] == pytest.approx(total / count, rel=1e-5)


# --- ranks and parts ---


SPLIT = {
    "2 ranks": (2, {}),
    "4 ranks": (4, {}),
    "4 parts": (1, {"micro_batches": 4}),
    "2 ranks, 2 parts": (2, {"micro_batches": 2}),
    "tp": (2, {"parallel": settings.ParallelConfig(tp=2)}),
    "cp": (2, {"parallel": settings.ParallelConfig(cp=2)}),
    "pp": (2, {"parallel": settings.ParallelConfig(pp=2), "micro_batches": 2}),
}


@pytest.fixture(scope="module")
def whole(folder):
    """A run on one rank, in one part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(1, "whole")
        run(1, "whole-gpt", kind="gpt")
        task = recipe().task()
    assert len(set(task.train.counts.tolist())) > 2, "windows have different numbers of answers"
    return folder


@pytest.mark.parametrize("how", SPLIT)
def test_ranks_and_micro_batches_change_neither_losses_nor_weights(whole, how):
    ranks, changes = SPLIT[how]
    run(ranks, how, **changes)
    assert_same(whole, how, "whole")


@pytest.mark.parametrize(("name", "changes"), [("gpt-2", {}), ("gpt-pp", SPLIT["pp"][1])])
def test_positions_of_a_gpt_go_along(whole, name, changes):
    run(2, name, kind="gpt", **changes)
    assert_same(whole, name, "whole-gpt")


def assert_same(folder, name, other):
    for kind, figure in (("step", "loss"), ("step", "norm"), ("evaluation", "held_out_loss")):
        found, expected = ([each[figure] for each in records(folder, n, kind)] for n in (name, other))
        np.testing.assert_allclose(found, expected, rtol=2e-5)
    expected = weights(folder, other)
    for parameter, values in weights(folder, name).items():
        np.testing.assert_allclose(values, expected[parameter], atol=1e-4)


def test_a_run_that_goes_on_has_the_samples_of_one_that_never_stopped(folder):
    checkpoint = settings.CheckpointConfig(every=2)
    run(1, "straight", steps=6, checkpoint=checkpoint)
    run(2, "broken", steps=6, checkpoint=replace(checkpoint, keep_last=9))
    jobs.remove_after(folder / "runs" / "broken", 2)
    run(4, "broken", steps=6, checkpoint=checkpoint, resume="auto")
    assert_same(folder, "broken", "straight")


def test_a_file_that_is_tokenised_before_makes_the_same_run(whole):
    assert main(["data", "chat", "mixed.chat", "mixed.jsonl", "--init-from", "llama"]) == 0
    run(2, "prepared", data=(Path("mixed.chat"),))
    assert_same(whole, "prepared", "whole")


# --- what a user sees ---


def test_it_learns_to_answer_on_two_ranks(folder, capfd):
    """All sums, and one that it has not seen."""
    given = ("--config", str(Path(train.__file__).parent / "configs" / "chat.toml"), "--init-from", "llama")
    given += ("--data", "sums.jsonl", "--text.window", "96", "--name", "sums", "--steps", "120")
    given += ("--optimizer.lr", "1e-2", "--optimizer.warmup-steps", "5", "--batch-size", "4")
    given += ("--checkpoint.every", "0", "--sample.length", "8")
    thread.run(2, launch, train.parse(given))
    printed = " ".join(capfd.readouterr().out.split())
    assert "24 examples to train on and 1 held out (0 truncated, 0 skipped)" in printed
    assert "windows of 96 tokens" in printed and "% of the tokens are answers" in printed
    assert "three plus" in printed or "plus" in printed.partition("--- sample ---")[2]
    losses = [each["loss"] for each in records(folder, "sums", "step")]
    assert losses[-1] < 0.02 * losses[0]
    asked = [("runs/sums", (), record) for record in SUMS[:24:6]]
    for place, more, record in [*asked, ("runs/sums/pretrained", ("--chat",), SUMS[3])]:
        question, answer = (message["content"] for message in record["messages"])
        generate.main([place, "--prompt", question, "--temperature", "0", "--length", "8", *more])
        assert capfd.readouterr().out.split("\n")[-2] == answer, (place, question)


def test_adapters_learn_answers_too_and_another_template_goes_along_with_what_is_exported(folder):
    Path("short.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    text = TextConfig(chat=True, chat_template=Path("short.jinja"))
    run(2, "lora", text=text, lora=settings.LoRAConfig(rank=2), export=True, steps=6)
    losses = [each["loss"] for each in records(folder, "lora", "step")]
    assert losses[-1] < losses[0]
    exported = folder / "runs" / "lora" / "pretrained"
    assert (exported / "chat_template.jinja").read_text() == Path("short.jinja").read_text()
    assert (exported / "tokenizer.json").read_bytes() == Path("llama/tokenizer.json").read_bytes()


def test_what_is_too_long_is_counted(folder):
    for too_long, truncated, skipped in (("truncate", 1, 0), ("skip", 0, 1)):
        text = TextConfig(
            chat=True, window=80, too_long=settings.built(TextConfig, {"too_long": too_long}).too_long
        )
        facts = recipe(text=text).task().facts()
        assert (facts["truncated_examples"], facts["skipped_examples"]) == (truncated, skipped)
        assert facts["train_examples"] + facts["held_out_examples"] + skipped == len(MIXED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--init-from", "llama"), "text.chat needs data"),
        (
            ("--data", "mixed.jsonl", "--architecture", "llama"),
            "text.chat needs init_from",
        ),
        (("--init-from", "llama", "--data", "bad.jsonl"), "bad.jsonl, line 1: no message of the assistant"),
        (("--init-from", "llama", "--data", "bad.jsonl:0.5"), "conversations have no weights"),
        (("--init-from", "llama", "--data", "none.jsonl"), "none.jsonl: No such file"),
        (
            ("--init-from", "gpt", "--data", "long.jsonl", "--text.window", "8"),
            "no conversation has an answer within",
        ),
        (("--init-from", "gpt", "--data", "mixed.jsonl", "--parallel.cp", "2"), "leave parallel.cp at 1"),
    ],
)
def test_what_cannot_be_learnt_is_one_line(folder, capfd, options, message):
    write(folder / "bad.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    write(folder / "long.jsonl", [said("a " * 100, "b")])
    if "cp" in options[-2]:
        with pytest.raises(ValueError, match=message):
            train.parse([*options, "--text.chat"]).task()
        return
    assert message in refused(capfd, 65, train.main, [*options, "--text.chat"])
