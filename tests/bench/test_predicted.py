"""bench.predicted: what its figures say of rows that are made up; and that it runs, on models of nothing."""

import json

import pytest

from bench import predicted
from bench.predicted import Row, Step
from shardrt.device.program import Step as Finished
from shardrt.simulate.clock import price
from shardrt.simulate.machine import Link, Machine, Processor
from tests.ranks import mpirun
from tests.simulate.written import Written


def row(strategy, measured, simulated, size="small", exposed=0.0):
    return Row(size, strategy, [Step(seconds, 0.1) for seconds in measured], Step(simulated, exposed))


def test_errors_are_of_medians_and_exposed_communication_is_in_parts_of_the_step():
    one = row("FULL_SHARD", [2.0, 9.0, 1.0], 2.2, exposed=0.4)
    assert one.error == pytest.approx(0.1)
    assert one.exposed_error == pytest.approx(0.15)
    found = predicted.figures(
        [one, row("NO_SHARD", [1.0], 0.7, exposed=0.1), row("A", [4.0], 4.0, exposed=0.1)]
    )
    assert (found["median_error"], found["worst_error"], found["worst_exposed_error"]) == (0.1, 0.3, 0.15)


def test_steps_that_others_disturbed_count_only_if_all_were():
    quiet, loud = Step(1.0, 0.1), Step(3.0, 0.5, others=0.5)
    some = Row("small", "A", [quiet, loud, loud], Step(1.0, 0.1))
    assert (some.seconds[0], some.exposed[0]) == (1.0, 0.1)
    assert Row("small", "A", [loud], Step(1.0, 0.1)).seconds[0] == 3.0
    assert "2 of 3 steps were disturbed" in predicted.lines([some])[-1]


def test_only_strategies_of_a_model_that_are_apart_have_an_order():
    near = [row("A", [1.0], 1.1), row("B", [1.02], 1.0), row("C", [2.0], 2.0, size="gpt2")]
    assert predicted.figures(near)["wrong_order"] == []
    assert predicted.figures(near)["best"] == pytest.approx(0.02)
    far = [row("A", [1.0], 1.1), row("B", [1.04], 1.0)]
    assert predicted.figures(far)["wrong_order"] == ["small: A before B"]
    level = [row("A", [1.0], 1.1), row("B", [1.04], 1.1)]  # one program
    assert predicted.figures(level)["wrong_order"] == []


def test_the_best_is_chosen_by_what_is_simulated_and_judged_by_what_was_measured():
    rows = [row("A", [1.0], 3.0), row("B", [1.5], 2.0), row("C", [2.0], 4.0)]
    assert predicted.figures(rows)["best"] == 0.5
    text = "\n".join(predicted.lines(rows))
    assert "small, A" in text and "+200.0%" in text and "takes 50.0 % more" in text


def test_exposed_is_what_compute_waits_for_streams_and_its_own_collectives_in_the_last_step():
    machine = Machine("m", "", "", False, 1, Processor({"": 1.0}, 1.0), Link(0.0, 1.0), Link(0.0, 1.0))
    program = Written()
    for number, nbytes in enumerate((5, 3)):  # compute waits 5, then 3 - 1
        program.work("gather", "", nbytes=nbytes)
        program.wait("compute", program.record("gather"), "")
        program.work("compute", "", flops=1)
        program.items.append(Finished(number))
    assert predicted.exposed(price([program], machine)) == pytest.approx(3 - 1)


@pytest.mark.mpi
@pytest.mark.slow
def test_strategies_are_measured_and_simulated_side_by_side(tmp_path):
    out, kept = tmp_path / "predicted.json", tmp_path / "today.toml"
    words = ("--tiny", "--turns", "1", "--strategy", "FULL_SHARD,FULL_SHARD+recomputed")
    done = mpirun(2, ["-m", "bench.predicted", *words, "-o", str(out), "--keep", str(kept)])
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    assert [row["strategy"] for row in told["rows"]] == ["FULL_SHARD", "FULL_SHARD+recomputed"]
    sharded, again = told["rows"]
    assert 0 < sharded["simulated_ms"] < again["simulated_ms"]
    assert all(len(row["measured_ms"]) == 1 and row["measured_ms"][0] > 0 for row in told["rows"])
    assert Machine.load(kept).device.bandwidth > 0
