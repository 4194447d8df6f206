"""Convolutions of ResNet-50 and RegNetY next to PyTorch's, in the faster of the two layouts that it knows."""

from collections.abc import Callable, Sequence

from ..kernels.case import Case, Maker, Sizes
from ..kernels.ops import conv2d
from .clock import Clock, Torch
from .products import compare
from .state import Run

# batch, channels, outputs, window, stride, padding, groups, height and width
SHAPES = {
    "ResNet-50 stage 1, 3 x 3": (64, 64, 64, 3, 1, 1, 1, 56),
    "ResNet-50 stage 3, 3 x 3": (64, 256, 256, 3, 1, 1, 1, 14),
    "RegNetY-16GF stage 2": (64, 448, 448, 3, 1, 1, 4, 28),
}
_NAMES = {"forward": "forward", "input": "input gradient", "weight": "weight gradient"}


def measure(run: Run, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
    """Three rows for each shape, in bfloat16; the gradient of the weight is float32, as in training."""
    clock = Clock()
    torch = Torch(clock)
    with torch.stream():
        for name, shape in (shapes or SHAPES).items():
            with run.guarded(name):
                for case in conv2d(Maker(Sizes(convolutions={name: shape}), "bfloat16")):
                    theirs, layout = _fastest(torch, case) if torch.there else (None, "")
                    compare(run, clock, torch, case, f"{name}, {_NAMES[case.which]}{layout}", theirs=theirs)


def _fastest(torch: Torch, case: Case) -> tuple[Callable[[], Sequence], str]:
    """(PyTorch's call, its layout), tuned by cuDNN's own benchmark."""
    t, found = torch.torch, []
    t.backends.cudnn.benchmark = True
    for layout, name in ("contiguous_format", "NCHW"), ("channels_last", "NHWC"):
        how = {"memory_format": getattr(t, layout)}
        call = case.peer(t, *(torch.of(array).contiguous(**how) for array in case.inputs))
        found.append((torch.seconds(call), call, f" (torch: {name})"))
    return min(found, key=lambda each: each[0])[1:]
