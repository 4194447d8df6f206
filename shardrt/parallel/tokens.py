"""Tokens that lie on the ranks of a tensor-parallel axis where experts are: each rank routes a part of them.

With sequence parallelism they lie so already. Without it all ranks of the axis have the same tokens, of which
each rank takes its slice, and the outputs are gathered. So no two ranks route the same token, and
parameters inside, the router's among them, have a part of their gradient on each rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardrt import random
from shardrt.functional.collective import gather_same, scatter_to
from shardrt.nn.module import Module
from shardrt.nn.moe import MoE, Router
from shardrt.parallel.axis import Axis, recorded
from shardrt.parallel.conversion import Converting
from shardrt.parallel.styles import Style, partial
from shardrt.tensor import Tensor


@dataclass(frozen=True)
class TokenParallel(Style):
    """An nn.MoE of which each rank has everything, for a part of the tokens.

    Nothing in it has its own style in the same plan. Its experts may also be split, by ExpertParallel
    on an axis that is made of this one and of those of the data (docs/explanation/experts.md).
    """

    modules = (MoE,)

    def apply(self, module: Module, axis: Axis) -> None:
        own = OwnTokens(axis)
        for parameter in dict.fromkeys(module.parameters()):
            placement = parameter.placement
            if placement is not None and placement.own_data:
                parameter.placement = replace(placement, beside=axis.mesh.axes)
            else:
                partial(parameter, axis)
        for router in module.modules():
            if isinstance(router, Router):
                router.balance_along(axis.mesh)
        module.set_batch_block(own.block)
        module.wrap_forward(own)


class OwnTokens(Converting):
    """Around an nn.MoE: it gets this rank's tokens; its loss is over all ranks of the axis together.

    Without gradients they may stay whole, on all ranks alike: then the ranks do the same.

    Raises:
        ValueError: where gradients are recorded and the tokens can't be split.
    """

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        self._whole = False  # in the forward that runs

    def block(self) -> random.Block:
        """Which block of the batch the tokens are, for the noise of a router."""
        batch = self.axis.batch()
        return batch if self._whole else batch.cut(self.axis.rank, self.axis.size)

    def run(self, module: Module, forward: Callable, /, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.axis.in_parts:
            y, loss = forward(x)
            return y, self._of_all(loss)
        ranks, tokens = self.axis.communicator, x.reshape(-1, x.shape[-1])
        if tokens.shape[0] % ranks.size:
            return self._run_whole(forward, x)
        y, loss = forward(scatter_to(tokens, ranks))
        return gather_same(y, ranks).reshape(x.shape), self._of_all(loss)

    def _run_whole(self, forward: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
        if recorded():
            raise ValueError(
                f"TokenParallel: {x.size // x.shape[-1]} tokens can't be split into {self.axis.size} equal "
                "parts"
            )
        self._whole = True
        try:
            return forward(x)
        finally:
            self._whole = False

    def _of_all(self, loss: Tensor) -> Tensor:
        """The mean of the ranks' losses; of sums over tokens (F.balance_sums) the sum."""
        ranks = gather_same(loss.reshape(1, *loss.shape), self.axis.communicator)
        return ranks.sum(0) if loss.ndim else ranks.mean()
