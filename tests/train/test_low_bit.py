"""Low-bit optimizer state in the training command: resumed in other layouts, to AdamW and back."""

from functools import partial

import pytest

from shardrt.optim.low_bit import BYTES
from tests.lab import jobs
from tests.lab.jobs import curves, records

pytestmark = pytest.mark.usefixtures("here")

COMMON = ("--batch-size", "8", "--checkpoint.every", "1")
run = partial(jobs.run, 4, common=COMMON)
SAME = {
    "adamw8bit": [*jobs.ON_HOST, "--memory.update-on", "host"],
    "adamw_bf16": [*jobs.ON_HOST],
    "lion8bit": jobs.HYBRID,
    "lion_bf16": ["--fsdp.strategy", "SHARD_GRAD_OP"],
}
folder = jobs.folder_of(
    {"plain": (4, ()), **{name: (4, ("--optimizer.name", name)) for name in SAME}}, COMMON
)
STATE = {"adamw8bit": 2 * BYTES, "adamw_bf16": 4, "lion8bit": BYTES, "lion_bf16": 2}  # bytes per element


@pytest.mark.parametrize("name", SAME)
def test_a_run_goes_on_where_it_was_saved_in_another_layout(folder, name):
    how, cut = ("--optimizer.name", name), f"{name}-cut"
    run(cut, *how)
    jobs.remove_after(folder / "runs" / cut, 2)
    run(cut, *how, *SAME[name], "--resume", "auto")
    assert curves(folder, cut) == curves(folder, name) != curves(folder, "plain")
    (ours,), (plain,) = records(folder, name, "run"), records(folder, "plain", "run")
    assert (
        ours["device_bytes"]["optimizer state"] * 8 == plain["device_bytes"]["optimizer state"] * STATE[name]
    )


def test_a_checkpoint_goes_on_with_float32_moments_and_back(folder):
    """The moments of AdamW are those that were saved, so its first step is that of 8 bits."""
    start = "runs/adamw8bit/checkpoints/step-00000002"
    for name in ("adamw", "adamw8bit", "adamw_bf16"):
        run(f"from_low_{name}", "--optimizer.name", name, "--resume", start)
    assert curves(folder, "from_low_adamw8bit")[0] == curves(folder, "adamw8bit")[0][2:]
    jobs.assert_alike(folder, "from_low_adamw", "from_low_adamw8bit", 1e-5)
    run("back", "--optimizer.name", "adamw8bit", "--resume", "runs/from_low_adamw/checkpoints/step-00000003")
    assert curves(folder, "back")[2] == curves(folder, "from_low_adamw")[2]  # nothing was left to do


def test_a_batch_in_parts_is_the_same_batch(folder):
    run("parts", "--optimizer.name", "adamw8bit", "--micro-batches", "2")
    jobs.assert_alike(folder, "parts", "adamw8bit", 1e-4)
