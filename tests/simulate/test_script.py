"""simulate/script.py: scripts and modules run as they stand in a simulated world, for some steps."""

import subprocess
import sys

import pytest

from shardrt.device.program import Collective, Step
from shardrt.simulate.script import NoScript, record, record_of
from tests.ranks import clean_environment

TRAINED = """
import sys
import numpy as np
from shardrt import device, nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from beside import WIDTH

if __name__ == "__main__":
    mesh = init_device_mesh("auto")
    model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    try:
        for step in range(int(sys.argv[1])):
            model(device.current().zeros((2, WIDTH), np.float32)).sum().backward()
            optimizer.step()
            print("step", step, "of", sys.argv[0])
    finally:
        model(device.current().zeros((2, WIDTH), np.float32))
"""


def in_a_process(command):
    """What a command prints, which must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps_of(program):
    return [item.number for item in program.items if isinstance(item, Step)]


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("WIDTH = 16\n")
    file = tmp_path / "train.py"
    file.write_text(TRAINED)
    return file


def test_a_script_has_its_arguments_and_neighbours_and_what_comes_behind_the_last_step_is_not_kept(
    script, capsys
):
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    (program,) = record(["train.py", "9"], ranks=2, steps=2)
    assert steps_of(program) == [0, 1] and isinstance(program.items[-1], Step)
    out, message = capsys.readouterr()
    assert (out, message) == ("", "step 0 of train.py\n")  # the second has not come back
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    (program,) = record(["train.py", "1"], ranks=2, steps=2)  # which ends by itself
    assert steps_of(program) == [0] and not isinstance(program.items[-1], Step)


def test_several_ranks_are_recorded_together(script):
    programs = record([str(script), "1"], ranks=6, stands_for={0: range(3), 4: range(3, 6)})
    assert [program.rank for program in programs] == [0, 4]
    calls = [[item.call for item in each.items if isinstance(item, Collective)] for each in programs]
    assert calls[0] == calls[1] != []


@pytest.mark.parametrize("command", [["-m", "models.train"], ["models.train"]])
def test_a_module_is_recorded_and_the_training_command_leaves_nothing(command, text):
    small = "--model.n-layer 1 --model.n-head 2 --model.n-embd 16 --model.block-size 16 --batch-size 4"
    (program,) = record([*command, *small.split(), "--data", "text.txt"], ranks=2)
    assert steps_of(program) == [0, 1]
    assert [path.name for path in text.iterdir()] == ["text.txt"]


def test_what_is_wrong_with_a_script_is_reported(tmp_path):
    file = tmp_path / "ends.py"
    file.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    assert record([str(file), "0"])[0].items == []
    with pytest.raises(SystemExit) as end:
        record([str(file), "3"])
    assert end.value.code == 3
    for command, message in (
        ([], "no script"),
        (["-m"], "no script"),
        (["nowhere.py"], "nowhere.py: No such file"),
        (["no.module"], "no.module: no such script or module"),
        (["-m", "shardrt.nn"], "shardrt.nn: no such"),
    ):
        with pytest.raises(NoScript, match=message):
            record(command)


def test_a_function_is_recorded_too(script):
    def step():
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        record_of(step, 2)
