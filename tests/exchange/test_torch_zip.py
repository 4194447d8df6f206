"""Files of torch.save, read and written without PyTorch: each kind of value, both ways.

fixtures/torch.pt is what PyTorch 2.13 has written: python -m tests.exchange.test_torch_zip
"""

import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shardrt.exchange.checkpoint import BadCheckpoint
from shardrt.exchange.output import File, Output
from shardrt.exchange.torch_file import torch_segments
from shardrt.exchange.torch_zip import open_torch
from tests.exchange.made import Held, whole

FIXTURE = Path(__file__).parent / "fixtures" / "torch.pt"
NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


def tree(tensor, leaf=lambda value: value):
    """A value of all kinds. tensor: makes one of an array and the name of its type; leaf: of a view."""
    numbers = np.arange(24).reshape(2, 3, 4) - 7
    large = tensor(np.arange(30).reshape(6, 5), "float32")
    return {
        "types": {name: tensor(abs(numbers) if name == "uint8" else numbers, name) for name in NAMES},
        "single": tensor(np.array(-5), "int64"),
        "empty": [tensor(np.zeros((0, 3)), "float32"), tensor(np.zeros((3, 0, 2)), "bfloat16")],
        "large": large,
        "rows": leaf(large[2:4]),
        "ordered": OrderedDict({"b": (leaf(large[5:]), ("x", ())), "a": [[], {}]}),
        3: [None, True, -1, 1 << 40, 2.5, "ü\n", (1 << 3000) + 1],
    }


def in_numpy():
    def array(values, name):
        return values.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    return tree(array)


def in_torch():
    import torch

    return tree(lambda values, name: torch.tensor(values).to(getattr(torch, name)))


def held(value):
    """The value with tensors of the converter in place of arrays."""
    if isinstance(value, dict):
        return {key: held(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(held, value))
    return Held(np.array(value, order="C")) if isinstance(value, np.ndarray) else value


def same(found, wanted, path="value"):
    """Compare all, types and bits."""
    if isinstance(wanted, np.ndarray):
        if hasattr(found, "untyped_storage"):  # PyTorch's, as bytes
            import torch

            assert str(found.dtype) == f"torch.{wanted.dtype.name}", path
            shape = tuple(found.shape)
            found = found.reshape(-1).view(torch.uint8).numpy().view(wanted.dtype).reshape(shape)
        else:
            found = whole(found)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
        assert found.tobytes() == wanted.tobytes(), path
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key, item in wanted.items():
            same(found[key], item, f"{path}.{key}")
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted) and len(found) == len(wanted), path
        for number, item in enumerate(wanted):
            same(found[number], item, f"{path}.{number}")
    else:
        assert type(found) is type(wanted) and found == wanted, path


def written(folder, value):
    """A file that the converter writes."""
    Output(folder, {}).write([File("ours.pt", torch_segments(value, "ours.pt"), "crc")])
    return folder / "ours.pt"


def test_what_torch_has_saved_is_read():
    same(open_torch(FIXTURE), in_numpy())


def test_what_torch_saves_here_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(in_torch(), tmp_path / "a.pt")
    same(open_torch(tmp_path / "a.pt"), in_numpy())
    (tmp_path / "b.pt").write_bytes(b"before" + (tmp_path / "a.pt").read_bytes() + b"behind")
    size = (tmp_path / "a.pt").stat().st_size
    same(open_torch(tmp_path / "b.pt", offset=6, length=size), in_numpy())


def test_checksums_that_torch_has_left_out_are_not_checked(tmp_path):
    torch = pytest.importorskip("torch")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(in_torch(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    same(open_torch(tmp_path / "a.pt"), in_numpy())


def test_parameters_and_modules_states_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(3, 2)
    layer.weight.mine = "an attribute"
    torch.save({"state": layer.state_dict(), "weight": layer.weight}, tmp_path / "a.pt")
    found = open_torch(tmp_path / "a.pt")
    for tensor in (found["state"]["weight"], found["weight"]):
        assert np.array_equal(whole(tensor), layer.weight.detach().numpy())


@pytest.mark.parametrize("how", ["transposed", "every second", "expanded"])
def test_strides_of_torch_are_refused_in_a_line(how, tmp_path):
    torch = pytest.importorskip("torch")
    matrix = torch.arange(12.0).reshape(3, 4)
    views = {"transposed": matrix.T, "every second": matrix[:, ::2], "expanded": matrix[:1].expand(3, 4)}
    torch.save({"x": views[how]}, tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match=r"only contiguous tensors are read: save its contiguous\(\)$"):
        open_torch(tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "complex64", "uint16"])
def test_types_that_are_not_read_are_named(name, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"x": torch.zeros(3).to(getattr(torch, name))}, tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match="names 'torch"):
        open_torch(tmp_path / "a.pt")


def test_torch_reads_what_is_written(tmp_path):
    torch = pytest.importorskip("torch")
    wanted = in_numpy()
    wanted[3].pop()  # weights_only reads no integer of more than 2,040 bits
    path = written(tmp_path / "new", held(wanted))
    for mapped in (False, True):
        same(torch.load(path, weights_only=True, mmap=mapped), wanted)


def test_what_is_written_is_read_and_is_a_zip_with_aligned_entries(tmp_path):
    path = written(tmp_path / "new", held(in_numpy()))
    same(open_torch(path), in_numpy())
    data = path.read_bytes()
    with zipfile.ZipFile(path) as zipped:
        assert zipped.testzip() is None
        for entry in zipped.infolist():
            lengths = struct.unpack_from("<HH", data, entry.header_offset + 26)
            assert (entry.header_offset + 30 + sum(lengths)) % 64 == 0


def test_types_that_torch_has_not_are_named_when_written():
    with pytest.raises(BadCheckpoint, match="torch.save has no storage of uint32"):
        torch_segments({"x": Held(np.zeros(2, np.uint32))}, "a.pt")


if __name__ == "__main__":
    import torch

    FIXTURE.parent.mkdir(exist_ok=True)
    torch.save(in_torch(), FIXTURE)
