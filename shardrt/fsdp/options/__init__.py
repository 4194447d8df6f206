"""Options of FSDP. They enter at the runtime's seams, and the runtime imports nothing from here.

- mixed_precision: element types of a unit
- low_precision: gathers and reductions in 16 bits
- quantised: gathers and reductions between hosts in 8 and 4 bits
- quantised_copies: the same for gradients of copies (HYBRID_SHARD)
- float8: matmuls in float8
- offload: parts of a unit in host memory
- packed_rows: only some parameters of a group are trained
- chunks: gradients of a large outer unit, chunk by chunk
- fixed_tree: bitwise identical on any number of ranks
- accumulation: no_sync and the divide factor
- full: whole parameters and gradients outside of forward
- entries: methods that gather as forward does
- split_modules: modules split over other axes before (shardrt.parallel)
- agreement: ranks compare their models before the first step
- step_trace: spans for traces, the watchdog's phase
"""

from operator import attrgetter

from shardrt.fsdp import buffers, composition, policy, setup, trainable
from shardrt.fsdp.api import PREPARATIONS
from shardrt.fsdp.checks import GROUP_CHECKS, RANK_CHECKS, UNIT_CHECKS
from shardrt.fsdp.gradient_path import PATHS
from shardrt.fsdp.observers import OBSERVERS
from shardrt.fsdp.options.agreement import compare_ranks, compile_once, is_recomputed
from shardrt.fsdp.options.chunks import ChunkedGradient
from shardrt.fsdp.options.fixed_tree import check_sums, check_world_invariant
from shardrt.fsdp.options.float8 import choose_float8
from shardrt.fsdp.options.low_precision import LowPrecisionTransfer, plan_wires
from shardrt.fsdp.options.mixed_precision import MixedPrecisionPolicy
from shardrt.fsdp.options.offload import UploadedTransfer, plan_staging
from shardrt.fsdp.options.packed_rows import PackedGradient, plan_packed
from shardrt.fsdp.options.quantised import (
    QuantisedGradient,
    QuantisedTransfer,
    connect_hosts,
    plan_quantised,
)
from shardrt.fsdp.options.quantised_checks import check_invariance, check_quantised
from shardrt.fsdp.options.quantised_copies import QuantisedCopies, plan_copies
from shardrt.fsdp.options.split_modules import SplitModules
from shardrt.fsdp.options.step_trace import StepTrace
from shardrt.fsdp.options.trained import FollowsRequiresGrad
from shardrt.fsdp.roles import ROLES, Role
from shardrt.fsdp.scratch import reserve
from shardrt.fsdp.transfer import TRANSFERS

# Packed rows come first: they are never sent in chunks, and not quantised.
PATHS += [PackedGradient, QuantisedGradient, QuantisedCopies, ChunkedGradient]
# 16 bits come before uploads, since they upload by themselves, and behind fewer bits.
TRANSFERS += [QuantisedTransfer, LowPrecisionTransfer, UploadedTransfer]
PREPARATIONS += [choose_float8, check_quantised]
RANK_CHECKS += [compare_ranks, compile_once]
UNIT_CHECKS += [check_world_invariant, check_invariance]
GROUP_CHECKS.append(check_sums)
OBSERVERS.append(StepTrace)
ROLES |= {
    "partial": Role("partial sums of gradients", ROLES["reduced"].maker),
    "wire": Role("16-bit parameters on the way", attrgetter("gather"), built=True),
    "reduce_wire": Role("16-bit gradients on the way", attrgetter("reducer"), built=True, gradient=True),
    "quantised": Role("quantised parameters on the way", attrgetter("gather"), built=True),
    "secondary": Role("secondary parameters", built=True),
    "dequantised": Role("dequantised parameters", built=True),
    "quantised_gradients": Role("quantised gradients on the way", attrgetter("reducer"), gradient=True),
    "quantisation_error": Role("errors of quantised gradients", built=True),
    "packed": Role("packed gradients on the way", attrgetter("reducer"), gradient=True),
    "used": Role("which parameters were used"),
    "upload": Role("staging from the host", built=True),
    "download": Role("staging to the host", built=True, gradient=True),
}
buffers.EXTRA_BUFFERS += [
    plan_wires,
    plan_quantised,
    plan_copies,
    plan_packed,
    plan_staging,
]  # in the order of a memory plan's rows
setup.BEFORE_ALLOCATION += [connect_hosts, reserve]
setup.GATHERED_TOGETHER.append(is_recomputed)
composition.active = SplitModules()
trainable.active = FollowsRequiresGrad
policy.default_precision = MixedPrecisionPolicy
