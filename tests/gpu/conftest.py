"""What tests on a GPU share. Without one each file of this folder is one skip."""

from collections import Counter
from functools import partial

import pytest

from shardrt import device
from shardrt.device import cuda
from shardrt.kernels.cuda import _compile, _launch
from shardrt.kernels.determinism import use_deterministic_algorithms
from tests.contracts import check
from tests.cuda import numbers

TOLERANCE = {"float32": 2.5e-6, "bfloat16": 5e-3}  # tests multiply them by up to 4 and, mostly, up to 2
ELEMENTS = ("float", "double", "__half", "__nv_bfloat16")


def pytest_pycollect_makemodule(module_path, parent):
    if not cuda.count():
        return _Skipped.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """Of tests of tests/cuda, which run on the CPU, all but the first case of each kernel are rest."""
    seen = Counter()
    for item in items:
        if item.path.name == "test_kernels.py" and item.path.parent.name == "gpu":
            params = getattr(item, "callspec", None)
            name = item.cls, item.originalname, params and params.params.get("kernel")
            if seen[name]:
                item.add_marker(pytest.mark.rest)
            seen[name] += 1


class _Skipped(pytest.Module):
    """A file that is not even imported: it may need CuPy."""

    def collect(self):
        pytest.skip("no GPU")


@pytest.fixture(scope="session")
def real(pytestconfig):
    """The real backend, with what most tests launch compiled beforehand, all cores at once.

    In software each is compiled when it is first launched: several processes would all compile all of them.
    """
    device.get("cuda").enter()
    backend = _launch.backend()
    if not pytestconfig.pluginmanager.hasplugin("tests.softgpu.plugin"):
        backend.prepare([(file, d) for file in _compile.files() for d in _compile.variants(file, ELEMENTS)])
    return backend


@pytest.fixture
def tolerance(monkeypatch):
    """That of tests/contracts becomes that of the GPU."""
    for name, limit in TOLERANCE.items():
        monkeypatch.setitem(numbers.TOLERANCE, name, limit)


@pytest.fixture
def on_gpu(gpu, tolerance):
    """check of tests/contracts, of kernels as training calls them: with the libraries that are there."""
    from tests.gpu.mirror import on_gpu

    return partial(check, gpu.kernels, launch=on_gpu)


@pytest.fixture
def emulated(real, tolerance):
    """For the tests of tests/cuda: not emulated."""
    from tests.gpu.mirror import Mirror

    device.get("cuda").enter()
    mirror = Mirror(real)
    before = _launch.use(mirror)
    yield mirror
    _launch.use(before)


@pytest.fixture
def gpu(real):
    """The device, current in this thread, with the real kernels; ranks that are threads may be on others."""
    with device.use(device.get("cuda")) as here:
        yield here


@pytest.fixture
def deterministic():
    """For tests of equal bits. tests/conftest.py ends it."""
    use_deterministic_algorithms(True)
