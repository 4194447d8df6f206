"""Puts cuda.py below the real CuPy. To be called before cupy is imported, in a process of its own.

CuPy's modules call CUDA through C pointers, which they look up by name in two modules of cupy_backends when
they are imported. The name of each of these capsules is its C signature. So C functions are made of them,
which call methods of the same names; an exception there becomes CuPy's.
"""

import ctypes
import re
from pathlib import Path

from tests.cuda.libraries import built
from tests.softgpu.cuda import CUDA

# C type -> how PyObject_CallMethod is told of it.
_FORMATS = {"intptr_t": "n", "size_t": "n", "int": "i", "unsigned int": "I", "PyObject *": "O"}
_RESULTS = {  # C type -> from a PyObject *, by these functions; the value that says "look for an exception"
    "int": ("PyLong_AsSsize_t", -1),
    "intptr_t": ("PyLong_AsSsize_t", 0),
    "float": ("PyFloat_AsDouble", -1),
}
_HEAD = """
#include <stdint.h>
#include <stddef.h>
typedef struct _object PyObject;
PyObject *PyObject_CallMethod(PyObject *, const char *, const char *, ...);
void Py_DecRef(PyObject *);
intptr_t PyLong_AsSsize_t(PyObject *);
double PyFloat_AsDouble(PyObject *);
PyObject *cuda;
"""
_OBJECT = """
PyObject *{module}_{name}({parameters}) {{ return PyObject_CallMethod(cuda, "{name}", "{format}"{values}); }}
"""
_NUMBER = """
{result} {module}_{name}({parameters}) {{
    PyObject *found = PyObject_CallMethod(cuda, "{name}", "{format}"{values});
    if (!found) return {error};
    {result} number = ({result}){convert}(found);
    Py_DecRef(found);
    return number;
}}
"""


def plug(folder: Path, cuda: CUDA) -> None:
    """Have CuPy, to be imported next, see `cuda`. folder: a private one, for what is compiled."""
    import cupy_backends.cuda.api.driver as driver
    import cupy_backends.cuda.api.runtime as runtime

    source, made = _HEAD, []
    for module in (runtime, driver):
        for name, capsule in module.__pyx_capi__.items():
            place = module.__name__.rpartition(".")[2]
            text = _function(place, name, _signature(capsule))
            if text:
                source += text
                made.append((module, name))
    functions = ctypes.PyDLL(str(built(folder, "cuda", source, ".c", ["cc", "-O1", "-shared", "-fPIC"])))
    ctypes.py_object.in_dll(functions, "cuda").value = cuda
    for module in (runtime, driver):  # for who calls it from Python
        for name in dir(module):
            if callable(getattr(CUDA, name, None)) and not name.startswith("__"):
                setattr(module, name, getattr(cuda, name))
    for module, name in made:
        function = getattr(functions, f"{module.__name__.rpartition('.')[2]}_{name}")
        _replace(module.__pyx_capi__, name, ctypes.cast(function, ctypes.c_void_p).value)


def _function(module: str, name: str, signature: str) -> str:
    """The C of a function that calls the method `name`; "" for what is none, or takes what we don't know."""
    match = re.fullmatch(r"(.*?) ?\((.*)\)", signature)
    if match is None:
        return ""
    result, types = match[1], match[2].split(", int __pyx_skip_dispatch")[0].split(", ")
    types = [kind for kind in types if kind not in ("void", "int __pyx_skip_dispatch")]
    if any(kind not in _FORMATS for kind in types):
        return ""
    parts = {
        "module": module,
        "name": name,
        "format": "(" + "".join(_FORMATS[kind] for kind in types) + ")",
        "parameters": ", ".join(f"{kind} a{i}" for i, kind in enumerate(types)) or "void",
        "values": "".join(f", a{i}" for i in range(len(types))),
    }
    if result == "PyObject *":
        return _OBJECT.format(**parts)
    if result not in _RESULTS:
        return ""
    convert, error = _RESULTS[result]
    return _NUMBER.format(**parts, result=result, convert=convert, error=error)


def _signature(capsule: object) -> str:
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return name(capsule).decode()


def _replace(capsules: dict, name: str, address: int) -> None:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    get = ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object]
    before = capsules[name]  # whose name the new one shares
    capsules[name] = new(address, get(before), None)
    _kept.append(before)


_kept: list[object] = []
