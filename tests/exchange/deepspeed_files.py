"""Folders that the real DeepSpeed 0.19.8 has written, and what it says is in them: tests need no DeepSpeed.

    python -m tests.exchange.deepspeed_files

makes them again, where DeepSpeed is installed: deepspeed_run.py trains three steps on 2 ranks with each of
CASES. A zip of deepspeed/ has the folder and truth.npz, with the weights, moments and counts of the loaded
engine (safe_get_full_fp32_param, safe_get_full_optimizer_state), and as fp32/NAME what zero_to_fp32.py gives.

With round_robin_gradients and without alignment the engine's addresses are those of another order than its
flat tensors have (stage_1_and_2.py, _link_all_hp_params): zero_to_fp32.py alone is right, and the moments are
those of the same run without it.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

HELD = Path(__file__).parent / "fixtures" / "deepspeed"
RUN = Path(__file__).with_name("deepspeed_run.py")
TRUTH = "truth.npz"
CASES = {
    "zero1": ("--stage", "1"),
    "zero2-bf16-frozen": ("--stage", "2", "--dtype", "bf16", "--frozen"),
    "zero3-tied": ("--stage", "3", "--tied", "--zero", '{"sub_group_size": 100}'),
    "zero3-frozen": ("--stage", "3", "--frozen"),
    "zero2-aligned": (
        "--stage",
        "2",
        "--zero",
        '{"round_robin_gradients": true, "parameter_alignment": true}',
    ),
    "zero2-round-robin": ("--stage", "2", "--zero", '{"round_robin_gradients": true}'),
    "zero0-bf16": ("--stage", "0", "--dtype", "bf16", "--one-group"),
}


def unpacked(case: str, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Put a case's files into a new folder; gives the folder and what DeepSpeed says."""
    with zipfile.ZipFile(HELD / f"{case}.zip") as held:
        held.extractall(folder)
    with np.load(folder / TRUTH) as truth:
        values = dict(truth)
    (folder / TRUTH).unlink()
    return folder, values


def launch(*words: str | Path, program: Path = RUN) -> None:
    """Run a program of DeepSpeed's on two ranks, on free ports."""
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, program, *words], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def main() -> None:
    """Make all zips."""
    HELD.mkdir(parents=True, exist_ok=True)
    for case, words in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            launch(*words, "--save", scratch, "--truth", Path(scratch, TRUTH))
            if case == "zero2-round-robin":
                with tempfile.TemporaryDirectory() as other:
                    launch("--stage", "2", "--save", other, "--truth", Path(scratch, TRUTH))
            files = [path for path in sorted(Path(scratch).rglob("*")) if path.suffix in (".pt", ".npz", "")]
            with zipfile.ZipFile(HELD / f"{case}.zip", "w", zipfile.ZIP_DEFLATED) as held:
                for path in files:
                    if path.is_file():  # not the programs that DeepSpeed puts next to them
                        name = zipfile.ZipInfo(str(path.relative_to(scratch)))
                        held.writestr(name, path.read_bytes(), zipfile.ZIP_DEFLATED)
        print(case, (HELD / f"{case}.zip").stat().st_size)


if __name__ == "__main__":
    main()
