"""GradScaler: dynamic loss scaling for float16, with PyTorch's names and meaning (Micikevicius et al., 2018).

The loss is multiplied so that small gradients survive in float16; before the update the gradients are divided
again, and a step whose gradients have overflowed is left out, on all ranks or on none.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm.protocol import Communicator
from shardrt.nn.placement import along_pipeline
from shardrt.nn.utils import merged
from shardrt.optim.optimizer import Optimizer, Slice
from shardrt.tensor import Tensor

_NO_GRADIENT, _FINITE, _OVERFLOW = 0.0, 1.0, 2.0  # in this order: ranks take the largest
_SMALLEST, _LARGEST = 2.0**-127, float(np.finfo(np.float32).max)  # scales: neither they nor 1 / them overflow
_UNSCALED, _STEPPED = "unscaled", "stepped"


class _Progress:
    """How far an optimizer is since the last update()."""

    __slots__ = ("stage", "found")

    def __init__(self, found: float) -> None:
        self.stage = _UNSCALED
        self.found = found


class GradScaler:
    """Scales the loss, unscales the gradients, skips steps that overflowed, and adapts the scale.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only to clip or read the gradients before the step
        scaler.step(optimizer)
        scaler.update()

    The scale is multiplied by `backoff_factor` after a skipped step, and by `growth_factor` after
    `growth_interval` steps in a row that were not. enabled=False: everything is passed through.

    Raises ValueError for factors on the wrong side of 1, or a scale or interval that is not positive.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        _check("init_scale", init_scale, growth_factor, backoff_factor, growth_interval)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._enabled = enabled
        self._scale = _float32(init_scale)
        self._growth_tracker = 0  # steps in a row that were not skipped
        self._has_scaled = False
        self._progress: dict[Optimizer, _Progress] = {}

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """The present factor of the loss."""
        return self._scale if self._enabled else 1.0

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Any:
        """A tensor, or a list or tuple of tensors, times the scale.

        Raises:
            TypeError: for anything else.
        """
        if not self._enabled:
            return outputs
        self._has_scaled = True
        if isinstance(outputs, Tensor):
            return outputs * self._scale
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.scale(output) for output in outputs)
        raise TypeError(f"GradScaler.scale: outputs must be tensors, got {type(outputs).__name__}")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale; one pass, which finds out whether all are finite.

        One all-reduce of one number per communicator, two in a pipeline: every rank knows the same. Call it
        on every rank.

        Raises:
            RuntimeError: if `scale` was never called, or this was, or `step` was, since `update`.
        """
        if not self._enabled:
            return
        self._check_scaled("unscale_", optimizer)
        if optimizer in self._progress:
            before = {_UNSCALED: "unscale_() was called for", _STEPPED: "step() was called for"}
            raise RuntimeError(
                f"GradScaler.unscale_: {before[self._progress[optimizer].stage]} this optimizer already; "
                "call update() at the end of the step"
            )
        optimizer.take_in()
        factor = _float32(1.0 / self._scale)
        found = max((_unscale(piece, factor) for piece in optimizer.slices), default=_NO_GRADIENT)
        found, self._has_scaled = _agreed(optimizer, found, self._has_scaled)
        self._check_scaled("unscale_")
        self._progress[optimizer] = _Progress(found)

    def step(self, optimizer: Optimizer) -> None:
        """`unscale_`, if it was not called, then optimizer.step(), unless a gradient was infinite or nan.

        Raises:
            RuntimeError: if `scale` was never called, `step` was since `update`, or there is no gradient.
        """
        if not self._enabled:
            return optimizer.step()
        self._check_scaled("step", optimizer)
        if optimizer not in self._progress:
            self.unscale_(optimizer)
        progress = self._progress[optimizer]
        if progress.stage == _STEPPED:
            raise RuntimeError("GradScaler.step: step() was called already; call update() after it")
        if progress.found == _NO_GRADIENT:
            raise RuntimeError("GradScaler.step: no parameter of this optimizer has a gradient")
        progress.stage = _STEPPED
        return optimizer.step() if progress.found == _FINITE else None

    def update(self, new_scale: float | None = None) -> None:
        """Adapt the scale, or set it to `new_scale`; at the end of a step, after all optimizers.

        Raises:
            RuntimeError: if no gradients were checked since the last update.
        """
        if not self._enabled:
            return
        self._check_scaled("update")
        found = [progress.found for progress in self._progress.values() if progress.found != _NO_GRADIENT]
        if new_scale is not None:
            self._scale = _float32(new_scale)
        elif not found:
            raise RuntimeError("GradScaler.update: call step() or unscale_() first, with gradients")
        elif _OVERFLOW in found:
            self._scale = _float32(self._scale * self.backoff_factor)
            self._growth_tracker = 0
        else:
            self._grow()
        self._progress = {}

    def _grow(self) -> None:
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker = 0
            larger = self._scale * self.growth_factor
            if larger <= _LARGEST:
                self._scale = _float32(larger)

    def state_dict(self) -> dict[str, Any]:
        """Scale, settings and how long it has not been changed; empty if not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: if that is empty, of a scaler not enabled, or has wrong entries; nothing is changed
                then.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise ValueError(
                "GradScaler.load_state_dict: state_dict is empty, from a scaler with enabled=False"
            )
        names = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        found = [state_dict.get(name) for name in names] if isinstance(state_dict, dict) else []
        if not found or not all(isinstance(value, int | float) and abs(value) < 1e300 for value in found):
            message = str(state_dict)[:200]
            raise ValueError(
                f"GradScaler: a state must have finite numbers {', '.join(names)}; got {message}"
            )
        scale, growth, backoff, interval, tracker = found
        _check("scale", scale, growth, backoff, interval)
        if not 0 <= tracker < interval or tracker != int(tracker):
            raise ValueError(f"GradScaler: _growth_tracker must be in [0, {interval}), got {tracker}")
        self._scale, self._growth_tracker = _float32(scale), tracker
        self.growth_factor, self.backoff_factor, self.growth_interval = growth, backoff, interval

    def _check_scaled(self, method: str, optimizer: Optimizer | None = None) -> None:
        """optimizer: given, a pipeline's may pass: of its ranks the last alone see the loss; see _agreed."""
        if not self._has_scaled and (optimizer is None or _others(optimizer) is None):
            raise RuntimeError(f"GradScaler.{method}: call scale(loss) first, and backward on the result")


def _check(name: str, scale: float, growth: float, backoff: float, interval: int) -> None:
    """Raise ValueError for impossible settings; `name` is the name of the scale."""
    if not scale > 0:
        raise ValueError(f"GradScaler: {name} must be positive, got {scale}")
    if not _SMALLEST <= scale <= _LARGEST:
        raise ValueError(f"GradScaler: {name} must be in [{_SMALLEST:g}, {_LARGEST:g}], got {scale}")
    if not growth > 1:
        raise ValueError(f"GradScaler: growth_factor must be more than 1, got {growth}")
    if not 0 < backoff < 1:
        raise ValueError(f"GradScaler: backoff_factor must be between 0 and 1, got {backoff}")
    if not interval > 0:
        raise ValueError(f"GradScaler: growth_interval must be positive, got {interval}")


def _unscale(piece: Slice, factor: float) -> float:
    """Multiply the gradients of one storage, where this optimizer owns them."""
    gradient = piece.storage.complete_gradient()
    if gradient is None:
        return _NO_GRADIENT
    piece.storage.refuse_applied("GradScaler.unscale_")
    finite = [
        device.of(gradient).kernels.elementwise.unscale_(gradient[start:stop], factor)
        for start, stop in merged((start, stop) for start, stop, _ in piece.due().rows)
    ]
    return _FINITE if all(finite) else _OVERFLOW


def _others(optimizer: Optimizer) -> Communicator | None:
    """The group of ranks of all stages of a pipeline; None for other parameters."""
    return along_pipeline(parameter for group in optimizer.param_groups for parameter in group["params"])


def _agreed(optimizer: Optimizer, found: float, scaled: bool) -> tuple[float, bool]:
    """The worst result of any rank, and whether any has scaled; each rank passes on the received values."""
    own = [piece.storage.communicator for piece in optimizer.slices]
    others = _others(optimizer)
    communicators: dict[Communicator | None, None] = dict.fromkeys([*own, others])
    value = np.array([found] if others is None else [found, scaled])
    for communicator in communicators:
        if communicator is not None:
            communicator.all_reduce(value, op="max", stream=device.current().current_stream)
    return float(value[0]), scaled or bool(value[-1] and others is not None)


def _float32(value: float) -> float:
    """As PyTorch, whose scale is a float32 tensor."""
    return float(np.float32(value))
