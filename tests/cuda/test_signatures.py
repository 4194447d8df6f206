"""kernels/cuda and kernels/shape have the functions of kernels/cpu, with the same parameters."""

import importlib
import inspect

import pytest

from shardrt.kernels import cpu, cuda, shape

HOST_ONLY = {"set_blas_threads", "threads", "set_threads"}  # a GPU has no threads to set
WITHIN = {"cast.narrow", "matmul.affine", "matmul.widened"}  # what other kernels of the CPU call
OF_SHAPE = {"Answer", "Cost", "New", "ON_CPU"}
ON_GPU = {"float8"}  # no CPU has it
MODULES = [name for name in cpu.__all__ if inspect.ismodule(getattr(cpu, name))]


def functions_of(package, module):
    """Public name -> [(parameter, kind, default)] of the functions that a module defines for others."""
    found = importlib.import_module(f"shardrt.kernels.{package}.{module}")
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for name, function in vars(found).items()
        if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == found.__name__
    }


def test_every_module_has_its_twins():
    assert set(cuda.__all__) == set(shape.__all__) - OF_SHAPE == set(cpu.__all__) - HOST_ONLY | ON_GPU
    assert len(MODULES) == 24


def test_what_costs_other_on_a_cpu_has_the_same_parameters():
    for name, value in shape.ON_CPU.items():
        module, name = name.split(".")
        assert inspect.isfunction(value) or value == getattr(getattr(cpu, module), name)
        if inspect.isfunction(value):
            assert inspect.signature(value) == inspect.signature(getattr(getattr(shape, module), name))


@pytest.mark.parametrize("module", ON_GPU)
def test_what_a_gpu_alone_has_costs_what_has_its_parameters(module):
    assert functions_of("cuda", module) == functions_of("shape", module)


@pytest.mark.parametrize("module", MODULES)
def test_functions_and_their_parameters_are_the_same(module):
    on_cpu = functions_of("cpu", module)
    on_cuda, in_shape = functions_of("cuda", module), functions_of("shape", module)
    for name in [each for each in on_cpu if each in HOST_ONLY or f"{module}.{each}" in WITHIN]:
        del on_cpu[name]
    assert on_cpu
    for name, parameters in on_cpu.items():
        assert on_cuda.get(name) == parameters, name
        assert in_shape.get(name) == parameters, name
