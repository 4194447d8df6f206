"""Options of FSDP. They enter at the runtime's seams, and the runtime imports nothing from here.

packed_rows (only some parameters are trained), chunks (gradients of a large outer unit), fixed_tree (bitwise
identical on any number of ranks), offload (parts of a unit in host memory), step_trace (traces).
"""

from shardrt.fsdp.checks import GROUP_CHECKS, UNIT_CHECKS
from shardrt.fsdp.gradient_path import PATHS
from shardrt.fsdp.observers import OBSERVERS
from shardrt.fsdp.options.chunks import ChunkedGradient
from shardrt.fsdp.options.fixed_tree import check_sums, check_world_invariant
from shardrt.fsdp.options.packed_rows import PackedGradient
from shardrt.fsdp.options.step_trace import StepTrace

OBSERVERS.append(StepTrace)
PATHS += [PackedGradient, ChunkedGradient]  # packed rows come first: they are never sent in chunks
UNIT_CHECKS.append(check_world_invariant)
GROUP_CHECKS.append(check_sums)
