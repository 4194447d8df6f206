"""CuPy's errors, by CUDA's numbers."""

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONFIGURATION = 1, 2, 9
INVALID_DEVICE, DEVICE_UNINITIALIZED = 101, 201
INVALID_HANDLE, NOT_READY = 400, 600
ILLEGAL_ADDRESS, LAUNCH_FAILURE = 700, 719
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_MERGE = 900, 901, 902
CAPTURE_UNMATCHED, CAPTURE_UNJOINED, CAPTURE_ISOLATION = 903, 904, 905
CAPTURED_EVENT = 907


def failed(status: int, detail: str = "") -> RuntimeError:
    """A CUDARuntimeError. detail: what CUDA would not say."""
    from cupy_backends.cuda.api.runtime import CUDARuntimeError

    error = CUDARuntimeError(status)
    if detail:
        error.args = (f"{error} ({detail})",)
    return error
