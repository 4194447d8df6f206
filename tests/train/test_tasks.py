"""models/tasks.py: what the seam promises to a loop, and that the recipes for digits learn."""

import json
import tomllib

import numpy as np
import pytest

from models.tasks import ImageClassification, ImagesConfig
from shardrt.comm import init_device_mesh
from tests.ranks import ROOT, mpirun, run_ranks

pytest.importorskip("sklearn")
CONFIGS = ROOT / "models" / "configs"


def task_of(batch_size=12, **options):
    return ImageClassification(
        ImagesConfig(**options), init_device_mesh("auto"), batch_size=batch_size, seed=1
    )


def test_parts_ranks_and_steps_add_up_to_the_whole_batch():
    """The loss of a step, and what is evaluated, do not depend on how batches are cut."""

    def rank(parts):
        task = task_of(60, smoothing=0.1)
        model = task.model()
        ((_, batch),) = zip([0], task.batches(3, 4), strict=True)
        pieces = task.parts(batch, parts)
        assert len(pieces) == parts and len({len(labels) for _, labels in pieces}) == 1
        return sum(float(task.loss(model, piece)) for piece in pieces), task.evaluate(model)

    def whole(size, parts):
        results = run_ranks(size, rank, parts)
        figures = {name: np.sum([r[1][name] for r in results], axis=0) for name in results[0][1]}
        return sum(loss for loss, _ in results), figures

    loss, figures = whole(1, 1)
    assert 1.5 < loss < 4 and figures["held_out_accuracy"][1] == 359
    for size, parts in ((1, 3), (2, 2), (3, 1)):
        other, other_figures = whole(size, parts)
        assert other == pytest.approx(loss, rel=1e-5)
        for name in figures:
            np.testing.assert_allclose(other_figures[name], figures[name], rtol=1e-5)


def test_batches_go_on_from_any_step():
    task = task_of()
    whole = list(task.batches(0, 4))
    for one, other in zip(whole[2:], task.batches(2, 4), strict=True):
        for array, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(array, same)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["digits-vit", "digits-regnet"])
def test_the_recipes_learn_on_two_ranks(name, tmp_path):
    """A seventh of the recipe; bench/results has the curves of the whole."""
    recipe, result = (CONFIGS / f"{name}.toml").read_text(), tmp_path / "result.json"
    steps = tomllib.loads(recipe)["steps"]
    (tmp_path / "short.toml").write_text(recipe.replace(f"steps = {steps}", f"steps = {steps // 70 * 10}"))
    done = mpirun(2, ["-m", "bench.digits", str(tmp_path / "short.toml"), "--json", str(result)], timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert found["ranks"] == 2 and len(found["curve"]) == 10
    assert found["accuracy"] == found["curve"][-1]["held_out_accuracy"] > 0.85
    assert found["curve"][0]["loss"] > 1.2 * found["curve"][-1]["loss"]


def test_settings_that_make_no_sense_are_an_error():
    for options, told in [
        ({"model": "vit-b17"}, "model must be one of .*vit-b16.*regnety-16gf.*, got 'vit-b17'"),
        ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\), got 1.0"),
        ({"channels": 2}, "channels 1 or 3"),
    ]:
        with pytest.raises(ValueError, match=told):
            ImagesConfig(**options)
    with pytest.raises(ValueError, match="no-such-folder does not exist"):
        task_of(data="no-such-folder")
