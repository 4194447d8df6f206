"""Modules that are split over ranks, along an axis of the mesh next to the axes of the data.

Read in this order: axis, saved, conversion, styles, vocabulary, context, tokens, experts, tensor, invariant.
Pipelines: cut, times, twin, stage, table, schedules, carrier, step, memory, whole, pipeline.
Hosts that train apart: hub, outer_exchange, diloco.
"""

from shardrt.parallel.context import ContextParallel, SequencePart, context_plan, shard_sequence
from shardrt.parallel.diloco import DiLoCo, check_diloco, check_warmup, outer_bytes, strided_fragments
from shardrt.parallel.experts import ExpertParallel, expert_plan, most_rows
from shardrt.parallel.invariant import set_tensor_invariant
from shardrt.parallel.outer_exchange import HubExchange, HubLost, LeftBehind
from shardrt.parallel.pipeline import Pipeline
from shardrt.parallel.stage import Stage, pipeline_stages, sum_tied
from shardrt.parallel.styles import ColwiseParallel, HeadParallel, RowwiseParallel, SequenceParallel
from shardrt.parallel.tensor import parallelize_module
from shardrt.parallel.tokens import TokenParallel
from shardrt.parallel.vocabulary import VocabParallel

__all__ = [
    "ColwiseParallel",
    "ContextParallel",
    "DiLoCo",
    "ExpertParallel",
    "HeadParallel",
    "HubExchange",
    "HubLost",
    "LeftBehind",
    "Pipeline",
    "RowwiseParallel",
    "SequenceParallel",
    "SequencePart",
    "Stage",
    "TokenParallel",
    "VocabParallel",
    "check_diloco",
    "check_warmup",
    "context_plan",
    "expert_plan",
    "most_rows",
    "outer_bytes",
    "parallelize_module",
    "pipeline_stages",
    "set_tensor_invariant",
    "shard_sequence",
    "strided_fragments",
    "sum_tied",
]
