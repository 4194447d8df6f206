"""Calls about modules and launches, by CuPy's names. Kernels compute, by the emulator of tests/cuda."""

import ctypes
import json

from tests.cuda.emulator import runtime
from tests.softgpu import errors
from tests.softgpu.errors import failed
from tests.softgpu.memory import Memory
from tests.softgpu.scheduler import Work

_SHARED = 227 << 10  # bytes that a block may have, static and dynamic, if the function was allowed them
_PLENTY = 48 << 10  # the same where it was not
STATIC = 512  # bytes: no kernel with dynamic shared memory has more (tests/cuda/test_compile.py)
_DYNAMIC_SHARED = 8  # the attribute of a function
_POINTER = 1 << 16  # call.h adds it to the size of an argument


class Kernels(Memory):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._kernels: dict[int, Kernel] = {}
        self._modules: dict[int, dict] = {}

    def moduleLoadData(self, code):
        """`code`: what compiler.py made, in the place of a cubin."""
        handle = self.handle()
        self.enter_context()
        self._modules[handle] = {"device": self.device, **json.loads(bytes(code)[4:].decode())}
        return handle

    def moduleUnload(self, module):
        """Its functions stay: nobody but CuPy's clean-up unloads."""

    def moduleGetFunction(self, module, name):
        name = name.decode() if isinstance(name, bytes) else name
        runtime()  # which the library needs
        found = self._modules[module]
        handle = self.handle()
        self._kernels[handle] = Kernel(ctypes.CDLL(found["library"]), name, found["device"])
        return handle

    def funcGetAttribute(self, attribute, function):
        return 64

    def funcSetAttribute(self, function, attribute, value):
        if attribute != _DYNAMIC_SHARED or value > _SHARED - STATIC:
            raise failed(errors.INVALID_VALUE)
        self._kernels[function].shared = value

    def occupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared):
        return 1

    def launchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        kernel, grid = self._kernels[function], (gx, gy, gz)
        devices = kernel.device, self.stream(stream).device, self.device
        if len(set(devices)) > 1:
            report = "{}: a function of device {}, a stream of {}, and the current device is {}"
            raise failed(errors.INVALID_HANDLE, report.format(kernel.name, *devices))
        fits = min(grid) > 0 and gx < 2**31 and max(gy, gz) < 65536 and 0 < bx <= 1024 and (by, bz) == (1, 1)
        if not fits or shared > kernel.shared:
            detail = f"{kernel.name}: grid {grid}, block {(bx, by, bz)}, {shared} bytes of {kernel.shared}"
            raise failed(errors.INVALID_CONFIGURATION, detail)
        arguments = kernel.arguments(parameters)
        for number, address in arguments[2]:
            if address and self.block(address, 0) is None:
                report = f"{kernel.name}: argument {number} is memory of the host that is not pinned"
                raise failed(errors.ILLEGAL_ADDRESS, report)
        self.issue("launch", stream, Work(lambda: kernel.run(grid, bx, shared, arguments)), kernel.name)


class Kernel:
    """A function of a library that compiler.py made."""

    def __init__(self, library: ctypes.CDLL, name: str, device: int) -> None:
        self.name, self.device, self.shared = name, device, _PLENTY - STATIC
        self._call = getattr(library, f"call_{name}")
        sizes = (ctypes.c_size_t * 64)()
        self._sizes = sizes[: getattr(library, f"sizes_{name}")(sizes)]

    def arguments(self, parameters: int) -> tuple:
        """Of a launch: copies of what it is given, where they are, and (which, address) of pointers."""
        pointers = (ctypes.c_void_p * len(self._sizes)).from_address(parameters) if self._sizes else ()
        kept = [
            ctypes.create_string_buffer(ctypes.string_at(pointer, size % _POINTER), size % _POINTER)
            for pointer, size in zip(pointers, self._sizes, strict=True)
        ]
        addresses = [
            (number, int.from_bytes(kept[number], "little"))
            for number, size in enumerate(self._sizes)
            if size > _POINTER
        ]
        return kept, (ctypes.c_void_p * max(1, len(kept)))(*map(ctypes.addressof, kept)), addresses

    def run(self, grid, threads, shared, arguments) -> None:
        message = ctypes.create_string_buffer(200)
        where = (ctypes.c_uint * 3)(*grid)
        if runtime().shim_launch(self._call, arguments[1], where, threads, ctypes.c_size_t(shared), message):
            raise failed(errors.LAUNCH_FAILURE, f"{self.name}: {message.value.decode()}")
