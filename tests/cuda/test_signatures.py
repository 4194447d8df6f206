"""kernels/cuda has the functions of kernels/cpu, with the same parameters."""

import importlib
import inspect

import pytest

from shardrt.kernels import cpu, cuda

WITHIN = {"cast.narrow", "matmul.affine", "matmul.widened"}  # what other kernels of the CPU call
ON_GPU = {"float8"}  # no CPU has it


def modules_of(package):
    """The names of its public modules."""
    return [name for name, value in vars(package).items() if inspect.ismodule(value) and name[0] != "_"]


MODULES = modules_of(cpu)


def functions_of(package, module):
    """Public name -> [(parameter, kind, default)] of the functions that a module defines for others."""
    found = importlib.import_module(f"shardrt.kernels.{package}.{module}")
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for name, function in vars(found).items()
        if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == found.__name__
    }


def test_every_module_has_its_twin():
    assert set(modules_of(cuda)) == set(MODULES) | ON_GPU
    assert "warm_up" in cuda.__all__
    assert len(MODULES) == 30


@pytest.mark.parametrize("module", MODULES)
def test_functions_and_their_parameters_are_the_same(module):
    on_cpu, on_cuda = functions_of("cpu", module), functions_of("cuda", module)
    for name in [each for each in on_cpu if f"{module}.{each}" in WITHIN]:
        del on_cpu[name]
    assert on_cpu
    for name, parameters in on_cpu.items():
        assert on_cuda.get(name) == parameters, name
