"""bench.machine: fits of measurements that are made up, what a watch keeps, and a file that can be loaded."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from bench import curves, machine
from bench.curves import COPY, PRODUCTS, device_of
from bench.watched import Sample, watched
from shardrt import device
from shardrt.comm import init_device_mesh
from shardrt.device.program import Work
from shardrt.kernels import onednn
from shardrt.simulate.links import transfer
from shardrt.simulate.machine import Machine, Processor, _made
from tests.ranks import mpirun


def product(m, n, k, rate, name="linear.forward"):
    flops = 2 * m * n * k
    return Sample(name, flops, 4 * (m * n + n * k + m * k), (m, n, k), "float32", flops / rate)


def moved(name, nbytes, rate):
    return Sample(name, 0, nbytes, (), "float32", nbytes / rate)


def work_of(sample):
    return Work("", sample.name, (), (), sample.flops, sample.nbytes, sizes=sample.sizes, dtype=sample.dtype)


def test_the_peaks_are_the_fastest_and_each_call_takes_on_the_machine_what_it_took():
    samples = [product(256, 256, 256, 50e9), product(1024, 1024, 1024, 100e9)]
    samples += [product(1024, 512, 1024, 80e9, "linear.backward_input"), moved(COPY, 1 << 20, 20e9)]
    samples += [
        moved(COPY, 1 << 26, 10e9),
        moved("adamw.step", 1 << 16, 2e9),
        moved("adamw.step", 1 << 24, 8e9),
    ]
    found = device_of(samples)
    assert (found["flops"], found["bandwidth"]) == ({"": 100e9, "float32": 100e9}, 20e9)
    processor = _made(Processor, found, "")
    for sample in samples:
        assert max(processor.demands(work_of(sample))) == pytest.approx(sample.seconds, rel=1e-3)
    between = max(processor.demands(Work("", "adamw.step", nbytes=1 << 20)))
    assert between == pytest.approx((1 << 20) / 5e9, rel=1e-3)  # half of the way from 2 to 8 in log size
    unknown = max(processor.demands(Work("", "dropout.forward", nbytes=1 << 26)))
    assert unknown == pytest.approx((1 << 26) / 10e9, rel=1e-3)  # as a copy


def test_a_point_is_what_its_calls_did_in_all_of_their_time():
    samples = [moved("x", 1000, 10.0), moved("x", 1000, 30.0), moved("x", 1100, 20.0)]
    ((size, part),) = curves.curve(samples, "nbytes", lambda _: 100.0)
    assert size == pytest.approx(3100 / 3, rel=1e-3)
    assert part == pytest.approx(3100 / (1000 / 10 + 1000 / 30 + 1100 / 20) / 100, rel=1e-3)


def test_a_call_that_was_disturbed_is_left_out_and_one_without_work_is_no_point():
    calls = [moved("x", 1000, 10.0)] * 4 + [moved("x", 1000, 4.0)]
    assert curves.undisturbed(calls) == calls[:4]
    assert curves.curve([Sample("x", 0, 0, (), "", 1.0)], "nbytes", lambda _: 1.0) == []


def test_narrow_products_have_a_curve_of_their_own_beside_that_of_their_size():
    wide = [product(1024, 1024, 1024, 100e9), product(256, 256, 256, 50e9)]
    thin = [product(1024, 1024, 4, 10e9), product(4, 1024, 1024, 20e9), product(1024, 4, 1024, 15e9)]
    found = device_of([*wide, *thin, moved(COPY, 1 << 20, 20e9)])
    (kernel,) = (each for each in found["kernels"] if each["name"] == "linear.forward")
    assert kernel["narrow"] == [[4, 0.15], [curves.WIDE, 1.0]]  # the median
    assert len(kernel["flops"]) == 2  # of the wide ones alone


def test_products_of_bfloat16_have_a_peak_and_parts_of_their_own():
    plain = [product(256, 256, 256, 50e9), product(1024, 1024, 1024, 100e9), moved(COPY, 1 << 20, 20e9)]
    low = [replace(product(*3 * (n,), rate), dtype="bfloat16") for n, rate in ((256, 60e9), (1024, 240e9))]
    found = device_of([*plain, *low])
    assert found["flops"] == {"": 240e9, "bfloat16": 240e9, "float32": 100e9}
    without = {each["name"]: each for each in device_of(plain)["kernels"]}
    assert [each for each in found["kernels"] if "dtype" not in each] == [*without.values()]
    processor = _made(Processor, found, "")
    for sample in [*plain[:2], *low]:
        assert max(processor.demands(work_of(sample))) == pytest.approx(sample.seconds, rel=1e-3)


@pytest.mark.skipif(not onednn.computes_bf16(), reason="the processor computes no bfloat16")
def test_products_that_were_measured_are_measured_again_in_bits():
    here = device.get("cpu")
    attention = Sample("attention.forward", 1, 1, (1, 2, 128, 128, 64), "float32", 1.0)
    names = "forward", "forward_gelu", "backward_input", "backward_weight", "backward_parameters"
    known = [product(256, 128, 384, 1e9, f"linear.{name}") for name in names]
    known += [product(64, 128, 128, 1e9), attention, replace(attention, name="attention.backward")]
    found = machine.of_bits(here, known)
    assert {sample.dtype for sample in found} == {"bfloat16"}
    seen = {(sample.name, sample.sizes) for sample in found}
    again = {
        (s.name.replace("parameters", "weight"), s.sizes) for s in known if min(s.sizes) != 64 or s.flops == 1
    }
    assert seen == again and all(sample.seconds > 0 for sample in found)


def test_without_products_or_copies_there_are_no_peaks():
    for samples in [product(8, 8, 8, 1.0)], [moved(COPY, 8, 1.0)]:
        with pytest.raises(ValueError, match="peaks need measurements"):
            device_of(samples)


def test_collectives_take_on_the_machine_what_they_took():
    rows = {"reduce_scatter": [(1e6, 3e-3), (1e3, 1.5e-5)], "all_gather": [(1e3, 1e-6)]}
    calls = curves.calls_of(rows, 1e-5)
    plain = Machine.load("h100-8")
    measured = replace(plain.collectives, base=1e-5, calls=calls)
    here = replace(plain, node=replace(plain.node, latency=0.0), collectives=measured)
    for sent, seconds in rows["reduce_scatter"]:
        assert transfer(here, "reduce_scatter", 2 * int(sent), range(2)).seconds == pytest.approx(
            seconds, rel=1e-3
        )
    assert calls["all_gather"] == [[1e3, pytest.approx(1e3 / 5e-7)]]  # no longer than a barrier


def test_what_a_collective_keeps_of_the_processor():
    assert curves.share(10.0, 4.0, 10.0) == 0.0  # it hides
    assert curves.share(10.0, 4.0, 14.0) == 1.0  # one after the other
    assert curves.share(10.0, 4.0, 12.0) == 0.5
    assert curves.share(4.0, 10.0, 15.0) == 1.0  # disturbed


def test_a_watch_keeps_the_calls_of_its_thread_with_what_their_twins_say_and_leaves_no_trace():
    here = device.get("cpu")
    before = here.kernels
    a, b, y = (np.ones((4, 4), np.float32) for _ in range(3))
    with watched(here) as watch:
        here.kernels.matmul.matmul(a, b, y)
        other = threading.Thread(target=here.kernels.matmul.matmul, args=(a, b, y))
        other.start()
        other.join()
    assert here.kernels is before and (y == 4).all()
    (sample,) = watch.samples
    assert (sample.name, sample.flops, sample.sizes) == ("matmul.matmul", 2 * 4**3, (4, 4, 4))
    assert (sample.dtype, sample.nbytes, watch.launches) == ("float32", 3 * 64, 1)
    assert sample.seconds > 0 < watch.spent


def test_of_each_step_that_was_not_disturbed_the_slowest_ranks_calls_count():
    models = machine.Models((), init_device_mesh("cpu"))
    slow, fast = ([product(64, 64, 64, rate)] for rate in (1e9, 2e9))
    # Samples, launches, seconds of the host; processor time of all, and of the rank. The last was disturbed.
    disturbed = slow, 7, 9.0, 19.0, 9.0
    models._steps = [[(fast, 3, 0.5, 1.0, 0.5), (slow, 1, 0.1, 1.0, 0.5), disturbed]]

    class Control:
        def all_gather_bytes(self, data):
            rest = (2, 0.1, 1.0, 0.5), (1, 0.3, 1.0, 0.5), disturbed[1:]
            other = [(slow, *each) for each in rest[-len(json.loads(data)) :]]
            message = [([list(vars(s).values()) for s in samples], *rest) for samples, *rest in other]
            return [data, json.dumps(message).encode()]

    samples, launch = models.slowest(Control())
    assert samples == [*fast, *slow]  # fast, whose host took longer; then the other rank's
    assert launch == pytest.approx((0.5 + 0.3) / (3 + 1))
    models._steps.append([disturbed])  # of another model, which has no other
    assert models.slowest(Control())[0] == [*fast, *slow, *slow]


@pytest.mark.mpi
def test_the_command_writes_a_file_that_is_a_machine(tmp_path):
    out = tmp_path / "mine.toml"
    done = mpirun(2, ["-m", "bench.machine", "--tiny", "--steps", "1", "--out", str(out)])
    assert done.returncode == 0, done.stderr
    found = Machine.load(out)
    assert (found.name, found.ranks_per_node, found.measured) == ("mine", 2, False)  # tiny is for a try
    assert found.device.whole and found.host_streams == ["compute"] and "bench.machine --tiny" in found.origin
    names = {kernel.name for kernel in found.device.kernels}
    assert {"", *PRODUCTS, "attention.forward", "adamw.step", "cross_entropy.forward_in_place"} <= names
    assert {"cast.pack", "rms_norm.backward", "conv2d.forward", "embedding.forward"} <= names
    assert all(found.collectives.calls[call] for call in ("all_gather", "reduce_scatter", "all_reduce"))
    assert 0 < found.host.item < 1 and 0 < found.host.launch < 1 and 0 < found.collectives.base < 1


def test_a_file_of_another_kind_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        machine.main(["--out", str(tmp_path / "mine.json")])
    assert end.value.code == 2 and "the name must end in .toml" in capsys.readouterr().err
