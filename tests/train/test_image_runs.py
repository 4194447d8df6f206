"""models.train on images: folders of them, resumed with batch norm, world-invariant, from and to files."""

import json
from dataclasses import replace

import numpy as np
import pytest

from models import generate, train
from models.hub import load_pretrained
from shardrt.comm import init_device_mesh, thread
from shardrt.train import job
from shardrt.train.metrics import RunLog
from tests.lab import jobs
from tests.lab.jobs import curves, records, remove_after
from tests.train.test_world_invariant import state

VIT = ["--architecture", "vit", "--model.n-layer", "1", "--model.n-head", "2", "--model.n-embd", "16"]
VIT += ["--model.n-hidden", "24", "--model.patch-size", "4", "--model.pool", "class"]
REGNET = ["--architecture", "regnet", "--model.depths", "1", "--model.widths", "16"]
REGNET += ["--model.strides", "1", "--model.stem-width", "16", "--model.stem-stride", "1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where `pictures` is: 16 x 16 pixels in colours, bright at one side and noisy; one file is broken."""
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for kind, bright in (("left", slice(0, 8)), ("right", slice(8, 16))):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 150, (16, 16, 3))
            pixels[:, bright] += 50
            path = tmp_path / "pictures" / kind / f"{number:02}.png"
            image.fromarray(pixels.astype(np.uint8)).save(path)
    (tmp_path / "pictures" / "left" / "00.png").write_text("no picture")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(ranks, name, options, *more):
    recipe = train.parse([*options, "--data", "pictures", "--batch-size", "16", "--name", name, *more])
    thread.run(ranks, job.launch, recipe)


def refused(options, capfd, *more):
    """The one line that a run ends with before it has written anything."""
    words = [*options, "--data", "pictures", "--batch-size", "16", "--name", "refused", *more]
    return jobs.refused(capfd, (2, 65), train.main, words)


def test_a_regnet_learns_to_tell_the_classes_of_a_folder(folder, capfd):
    run(2, "x", REGNET, "--steps", "40", "--optimizer.lr", "0.01", "--optimizer.warmup-steps", "4")
    (begun,), (end,) = records(folder, "x", "run"), records(folder, "x", "end")
    assert (begun["classes"], begun["train_images"], begun["held_out_images"]) == (2, 32, 8)
    assert records(folder, "x", "evaluation")[-1]["held_out_accuracy"] == 1
    assert records(folder, "x", "evaluation")[-1]["held_out_loss"] < 0.2
    assert end["skipped"] == 1 and end["skipped_files"] == ["pictures/left/00.png"]
    assert "; 1 images could not be read: 'pictures/left/00.png'" in capfd.readouterr().out


def closed(recipe):
    """What a task tells at its end, of which only rank 1 has met the broken file."""
    mesh = init_device_mesh("auto")
    task = recipe.task()
    model = task.model(mesh)
    if mesh.rank == 1:
        task.batch(range(32))  # an epoch: all images
    task.evaluation({"held_out_accuracy": 1.0})
    return task.close(model, RunLog(None))["skipped_files"]


def test_images_that_one_rank_could_not_read_are_named_by_all(folder):
    recipe = train.parse([*REGNET, "--data", "pictures", "--batch-size", "16"])
    assert thread.run(2, closed, recipe) == [["pictures/left/00.png"]] * 2


@pytest.mark.parametrize("synchronise", ["True", "False"])
def test_a_resumed_run_with_batch_norm_leaves_what_the_uninterrupted_one_does(folder, synchronise):
    """Of statistics that are each rank's own, checkpoints hold rank 0's: evaluations may then differ."""
    how = ("--steps", "6", "--checkpoint.every", "2", "--report.eval-interval", "3")
    how += ("--report.log-interval", "1", "--optimizer.lr", "0.01", "--optimizer.warmup-steps", "1")
    how += ("--images.synchronise", synchronise)
    run(2, "whole", REGNET, *how)
    run(2, "cut", REGNET, *how)
    remove_after(folder / "runs" / "cut", 4)
    run(2, "cut", REGNET, *how, "--resume", "auto")
    whole, cut = curves(folder, "whole"), curves(folder, "cut")
    assert (cut[0], cut[2]) == (whole[0], whole[2])
    assert cut[1] == whole[1] or synchronise == "False"
    buffers = {name: values for name, values in whole[2].items() if "running" in name}
    assert len(buffers) == 8 and len(set(buffers.values())) == 8


def test_the_same_bits_of_a_vit_on_one_and_two_ranks(folder):
    how = ("--deterministic", "world-invariant", "--micro-batches", "4", "--steps", "4")
    how += ("--checkpoint.every", "4", "--model.dropout", "0.1", "--report.log-interval", "1")
    found = []
    for ranks in (1, 2):
        run(ranks, f"on {ranks}", VIT, *how)
        checkpoint = folder / "runs" / f"on {ranks}" / "checkpoints" / "step-00000004"
        found.append((curves(folder, f"on {ranks}"), state(checkpoint)))
    assert found[0] == found[1]


def test_batch_norm_is_refused_where_no_bit_may_depend_on_the_ranks(folder, capfd):
    report = refused(REGNET, capfd, "--deterministic", "world-invariant")
    assert "the statistics of batch norm (stem.norm) depend on the number of ranks" in report
    assert not (folder / "runs").exists()


def test_a_vit_begins_with_the_weights_of_files_and_a_new_head_for_other_classes(folder, capfd):
    pytest.importorskip("sklearn")
    digits = train.parse([*VIT, "--batch-size", "16", "--name", "base", "--steps", "3", "--export", "True"])
    thread.run(2, job.launch, replace(digits, optimizer=replace(digits.optimizer, lr=0.01)))
    assert "afresh" not in capfd.readouterr().out
    base = folder / "runs" / "base" / "pretrained"
    same = replace(digits, name="same", init_from=base, steps=1)
    thread.run(2, job.launch, same)
    assert "afresh" not in capfd.readouterr().out

    how = ("--init-from", str(base), "--steps", "2", "--optimizer.lr", "1e-6", "--seed", "7")
    run(2, "tuned", VIT, *how, "--export", "True", "--checkpoint.every", "1")
    report = f"the head starts afresh for 2 classes: {base} has none of so many"
    assert " ".join(capfd.readouterr().out.split()).count(report) == 1
    table = json.loads((folder / "runs" / "tuned" / "pretrained" / "config.json").read_text())
    assert (table["id2label"], table["label2id"]) == ({"0": "left", "1": "right"}, {"left": 0, "right": 1})
    before, after = (load_pretrained(path).state_dict() for path in (base, folder / "runs/tuned/pretrained"))
    assert (before.pop("head.weight").shape, after.pop("head.weight").shape) == ((10, 16), (2, 16))
    del before["head.bias"], after["head.bias"]
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, atol=1e-5, err_msg=name)

    written = (folder / "runs/tuned/pretrained/model.safetensors").stat().st_mtime_ns
    run(2, "tuned", VIT, *how, "--export", "True", "--checkpoint.every", "1", "--resume", "auto")
    assert (folder / "runs/tuned/pretrained/model.safetensors").stat().st_mtime_ns > written

    adapted = (*VIT, "--init-from", str(base), "--lora.rank", "2")
    run(2, "adapted", adapted, "--steps", "2", "--export", "True")
    merged = load_pretrained(folder / "runs/adapted/pretrained").state_dict()
    np.testing.assert_array_equal(merged["patches.weight"], before["patches.weight"])
    assert (merged["blocks.0.mlp.up.weight"] != before["blocks.0.mlp.up.weight"]).any()

    for options, message in (
        (
            (*adapted, "--lora.targets", "*.qkv"),
            "lora.targets: the head starts from random values and would not be trained",
        ),
        (
            (*VIT, "--init-from", str(base), "--images.size", "16"),
            "needs images.size 8 and images.channels 1",
        ),
        ((*VIT, "--export", "True", "--model.pool", "mean"), "a class token, and this model has pool='mean'"),
        ((*REGNET, "--init-from", str(base)), "regnet has no Hugging Face format here; these have: GPT"),
        (("--architecture", "gpt", "--init-from", str(base)), "holds a ViT; architecture is 'gpt'"),
    ):
        assert message in refused(options, capfd)
    for directory, message in (
        ("runs/base/pretrained", "has a ViT, which can't generate text"),
        ("runs/base", "a run of vit can't generate text"),
    ):
        with pytest.raises(SystemExit):
            generate.main([directory])
        assert message in capfd.readouterr().err
