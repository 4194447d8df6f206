"""Tasks: what the seam promises to the loop, and what models.train makes of images, tokens and Llamas."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from models import generate, train
from models.hub import load_pretrained
from shardrt.comm import init_device_mesh, thread
from shardrt.train.job import launch
from shardrt.untrusted import printable
from tests.lab import jobs
from tests.lab.jobs import arguments, records, refused
from tests.ranks import ROOT

CONFIGS = ROOT / "models" / "configs"
TURN = threading.Lock()


def digits(**images):
    recipe = train.load(CONFIGS / "digits-vit.toml")
    model = replace(recipe.model, dropout=0.0)  # its masks are another's in each call
    return replace(recipe, model=model, images=replace(recipe.images, **images), batch_size=12)


def test_the_loss_of_a_step_does_not_depend_on_how_its_batch_is_cut():
    pytest.importorskip("sklearn")
    recipe = digits(smoothing=0.1)
    task, mesh = recipe.task(), init_device_mesh("cpu")
    model = task.model(mesh)

    def loss_of(samples):
        batch = task.batch(samples)
        return float(task.loss(model(**task.inputs(batch)), batch))

    whole = loss_of(range(36, 48))
    assert 12 * 1.5 < whole < 12 * 4
    for ranks, parts in ((1, 3), (2, 2), (3, 1)):
        cut = replace(recipe, micro_batches=parts)
        samples = [part for rank in range(ranks) for part in cut.samples(3, rank, ranks)]
        assert sorted(n for part in samples for n in part) == list(range(36, 48))
        assert sum(map(loss_of, samples)) == pytest.approx(whole, rel=1e-5)


def test_all_ranks_together_measure_every_held_out_image_once():
    pytest.importorskip("sklearn")
    task, mesh = digits().task(), init_device_mesh("cpu")
    model = task.model(mesh)

    def figures(ranks, limit):
        found = [
            task.measure(model(**task.inputs(batch)), batch)
            for rank in range(ranks)
            for batch in task.held_out(96 // ranks, limit, rank, ranks)
        ]
        return {name: np.sum([each[name] for each in found], axis=0) for name in found[0]}

    whole = figures(1, None)
    assert whole["held_out_accuracy"][1] == 359
    for name, values in figures(2, None).items():
        np.testing.assert_allclose(values, whole[name], rtol=1e-5)
    assert figures(3, 100)["held_out_loss"][1] == 100


def test_the_recipe_for_digits_learns_on_two_ranks(folder, capfd):
    """A part of the recipe; docs/howto/images.md has the whole. (test_image_runs.py has a RegNet.)"""
    pytest.importorskip("sklearn")
    recipe = train.parse(["--config", str(CONFIGS / "digits-vit.toml"), "--steps", "80", "--name", "x"])
    thread.run(2, launch, replace(recipe, report=replace(recipe.report, eval_interval=40)))
    evaluations = records(folder, "x", "evaluation")
    assert evaluations[-1]["held_out_accuracy"] > 0.8
    assert evaluations[-1]["held_out_loss"] < evaluations[0]["held_out_loss"]
    message = capfd.readouterr().out
    assert "img/s" in message and "% right" in message


def test_a_folder_of_images_that_is_not_there_is_one_line(folder, capfd):
    words = ["--architecture", "vit", "--data", "none", "--batch-size", "4", "--steps", "1"]
    assert refused(capfd, 65, train.main, words) == "error: images: none does not exist"


def test_an_image_that_cannot_be_read_ends_training_with_one_line(folder, capfd):
    pytest.importorskip("PIL")
    for kind in ("cat", "dog"):
        (folder / "pictures" / kind).mkdir(parents=True)
        for number in range(6):
            (folder / "pictures" / kind / f"{number}.png").write_text("no picture")
    options = ["--architecture", "vit", "--data", "pictures", "--batch-size", "4", "--steps", "1"]
    with pytest.raises(SystemExit) as stop:
        train.main([*options, "--images.on-corrupt", "error"])
    assert stop.value.code == 65
    assert "pictures" in capfd.readouterr().err.splitlines()[-1]


def in_turn(*args, parse=generate.options.command_line, **kwargs):
    """Python's parser, which the library of options uses, has counters that threads must not share."""
    with TURN:
        return parse(*args, **kwargs)


def test_a_llama_learns_from_a_token_file_with_documents_apart(folder, capsys, monkeypatch):
    words = {word: i for i, word in enumerate("[UNK] <end> all the world's a stage".split())}
    jobs.save_tokenizer("tokenizer.json", words)
    (folder / "lines.jsonl").write_text('{"text": "all the world\'s a stage"}\n' * 300)
    from shardrt.__main__ import main

    made = ["data", "make", "play.tokens", "lines.jsonl", "--tokenizer", "tokenizer.json", "--end", "<end>"]
    assert main(made) == 0
    shape = {"n-layer": 1, "n-head": 2, "n-kv-head": 1, "n-embd": 16, "n-hidden": 32}
    shape |= {"block-size": 16, "vocab-size": 7}
    options = ["--architecture", "llama", "--data", "play.tokens", "--steps", "60", "--batch-size", "8"]
    options += [word for name, value in shape.items() for word in (f"--model.{name}", str(value))]
    options += ["--text.separate-documents", "True", "--text.tokenizer", "tokenizer.json", "--name", "play"]
    options += ["--optimizer.lr", "0.02", "--optimizer.warmup-steps", "5", "--sample.prompt", "all the"]
    options += ["--export", "True"]
    train.main([*options, "--sample.length", "3", "--sample.temperature", "0", "--model.loss-chunk", "8"])
    (run,) = records(folder, "play", "run")
    assert (run["architecture"], run["train_tokens"]) == ("llama", 1710)
    assert records(folder, "play", "evaluation")[-1]["held_out_loss"] < 0.1
    assert records(folder, "play", "end")[0]["sample"] == "all the world's a stage"
    for directory in ("runs/play", "runs/play/pretrained"):  # with tokenizer.json beside it
        capsys.readouterr()
        wanted = [directory, "--prompt", "the", "--length", "2", "--temperature", "0"]
        with monkeypatch.context() as patch:
            patch.setattr(generate.options, "command_line", in_turn)
            thread.run(2, generate.main, wanted)
        assert capsys.readouterr().out == "the world's a\n"
        generate.main([directory, "--prompt", "the", "--length", "8", "--temperature", "0"])
        assert capsys.readouterr().out == "the world's a stage\n", "and then the text ends"
        generate.main([directory, "--prompt", "the", "--length", "8", "--temperature", "0", "--past-end"])
        assert capsys.readouterr().out.startswith("the world's a stage <end> ")
    config = json.loads((folder / "runs" / "play" / "pretrained" / "config.json").read_text())
    assert config["eos_token_id"] == 1, "as --end said"
    (folder / "runs" / "play" / "pretrained" / "tokenizer.json").unlink()
    with pytest.raises(SystemExit):
        generate.main(wanted)
    assert "tokenizer.json does not exist, and the model's 7 tokens are not bytes" in capsys.readouterr().err


def test_fine_tuning_begins_with_the_weights_of_files_and_exports_them_merged(folder, capsys):
    train.main(arguments("--name", "base", "--export", "True"))
    options = ["--init-from", "runs/base/pretrained", "--name", "tuned"]
    options += ["--text.window", "8", "--export", "True"]
    train.main(arguments(*options, "--lora.rank", "2", "--steps", "2", "--resume", ""))
    (run,) = records(folder, "tuned", "run")
    assert 0 < run["trained_parameters"] < run["parameters"] / 5
    base, tuned = (load_pretrained(folder / "runs" / name / "pretrained") for name in ("base", "tuned"))
    before, after = base.state_dict(), tuned.state_dict()
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed and all("attention" in name or "mlp" in name for name in changed), changed
    first = records(folder, "tuned", "step")[0]["loss"]
    assert first < records(folder, "base", "step")[0]["loss"]
    capsys.readouterr()
    generate.main(["runs/tuned", "--length", "4"])
    sample = printable(records(folder, "tuned", "end")[0]["sample"], lines=True)  # raw in the record alone
    assert capsys.readouterr().out == sample + "\n"
    options = options[:2] + ["--name", "further", "--lora.adapter", "runs/tuned/adapter", "--export", "True"]
    train.main(arguments(*options, "--text.window", "8", "--steps", "1", "--resume", ""))
    merged = load_pretrained(folder / "runs" / "further" / "pretrained").state_dict()
    assert any((after[name] != merged[name]).any() for name in changed)
    assert all(np.abs(after[name] - merged[name]).max() < 0.05 for name in after), "it went on from there"


test_what_makes_no_sense_is_one_line = jobs.one_line_tests(
    ("architecture must be one of gpt, llama, vit, regnet, got 'bert'", "--architecture", "bert"),
    ("text.window must be at most the model's block_size, 16, got 17", "--text.window", "17"),
    ("text.separate_documents needs a token file", "--text.separate-documents", "True"),
    ("nowhere/config.json", "--init-from", "nowhere"),
    ("hf download some-org/model --local-dir FOLDER", "--init-from", "some-org/model"),
    ("size is 'gpt2', but init_from sets the shape", "--init-from", "here", "--size", "gpt2"),
    ("rank must be at most", "--lora.rank", "99"),
    ("lora.adapter: init_from must name the model", "--lora.adapter", "here"),
    ("lora.adapter brings rank", "--lora.adapter", "here", "--lora.rank", "2"),
    code=(2, 65),
)


def test_a_size_by_name_goes_under_the_files_settings():
    recipe = train.parse(["--size", "gpt2-medium", "--config", str(CONFIGS / "gpt2.toml")])
    assert (recipe.model.n_layer, recipe.model.n_embd) == (12, 768), "what the file says goes over it"


def test_a_run_of_vit_is_loaded_again(folder):
    pytest.importorskip("sklearn")
    recipe = replace(digits(), steps=2, name="x", data=())
    launch(recipe)
    assert train.load(folder / "runs" / "x" / "config.toml") == recipe


def test_one_row_per_rank_is_evaluated_and_its_tokens_are_its_own(folder):
    """Targets are marked as ignored where a rank has less to evaluate: not so the tokens."""
    train.main(arguments("--batch-size", "1", "--name", "one"))
    assert len(records(folder, "one", "evaluation")) == 2


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(folder, capfd):
    train.main(arguments("--name", "a", "--checkpoint.every", "2"))
    settings_file = folder / "runs" / "a" / "config.toml"
    before = settings_file.read_text()
    for name, where in (("a", "auto"), ("b", "runs/a/checkpoints/step-00000002")):
        wider = arguments("--name", name, "--resume", where, "--model.n-embd", "32")
        line = refused(capfd, 65, train.main, wider)
        assert "in the checkpoint and ((256, 32), 'float32') in the model" in line, line
    assert settings_file.read_text() == before
    assert not (folder / "runs" / "b").exists()


def test_a_resume_says_what_is_not_as_it_was(folder, capfd):
    train.main(arguments("--name", "a", "--checkpoint.every", "2"))
    (folder / "other.txt").write_text("to be or not to be " * 200)
    capfd.readouterr()
    train.main(
        arguments("--name", "a", "--resume", "auto", "--seed", "7", "--data", "other.txt", "--steps", "4")
    )
    out = capfd.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("warning: not the run that was saved")]
    for message in ("seed was 0, is 7", "digest was sha256"):
        assert message in line, line


def test_a_finished_run_without_checkpoints_is_not_begun_again(folder, capfd):
    train.main(arguments("--name", "a"))
    message = refused(capfd, 2, train.main, arguments("--name", "a", "--resume", "auto"))
    assert "runs/a is finished and has no checkpoint to resume from" in message


@pytest.mark.parametrize("path", ["none.json", "tiny.toml"])
def test_a_tokenizer_that_bytes_do_not_need_is_told_before_training(folder, capfd, path):
    message = refused(capfd, (2, 65), train.main, arguments("--text.tokenizer", path))
    assert "the data are byte tokens" in message
