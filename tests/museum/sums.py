"""Bugs in which an update uses other gradients, or a kernel other parameters, than it should."""

from functools import partial

from shardrt.fsdp import collectives, process_groups
from shardrt.fsdp.gathers import Gathers
from shardrt.fsdp.options.low_precision import LowPrecisionTransfer
from shardrt.fsdp.options.split_modules import SplitModules
from shardrt.fsdp.sharded_gradient import ShardedGradient
from shardrt.fsdp.whole_gradient import WholeGradient
from shardrt.parallel import SequenceParallel
from tests.museum import programs
from tests.museum.bug import Bug, Change
from tests.museum.programs import Twice, load_between, train, train_experts, train_tensor_parallel

__all__ = ["MORE", "SUMS"]

STALE = r"a kernel needs .* parameters of \S+ after {} updates?, and reads .* after {} updates?\n.* embedding"
HYBRID = {"shape": (2, 2), "strategy": "HYBRID_SHARD"}

SUMS = [
    Bug(
        reference="deepspeedai/DeepSpeed#7718",
        title="[BUG]Incorrect gradient computation in ZeRO-2 with DeepSpeed ≥ 0.17.6",
        did="Gradient norms fell from 4.7 to 1.6: only the last micro-batch's gradient was left "
        "(cause: allenai/open-instruct#1498).",
        check="gradients",
        first=r"the gradient of \S+ from backward run 0 is lost at",
        operation="`adamw.step`",
        changes=(Change(ShardedGradient._goes_to, "self.reductions > 0", "False"),),
        program=partial(train, batches=2),
    ),
    Bug(
        reference="deepspeedai/DeepSpeed#8224",
        title="ZeRO-2 + bf16 silently computes incorrect gradients at multi-rank when a submodule is used "
        "more than once per step, a regression from #7665, still present in 0.19.3",
        did="Of a module that forward used twice, the gradient of one use was lost.",
        check="gradients",
        first=r"the gradient of blocks.1 from backward run 0",
        operation="`reduce_scatter`",
        changes=(
            Change(WholeGradient.target, "accumulate = position in self.written", "accumulate = False"),
        ),
        program=partial(train, make=Twice),
    ),
    Bug(
        reference="NVIDIA/Megatron-LM#6660",
        title="[Megatron-FSDP] Gradients doubled every microbatch (2^N amplification) when a grad buffer's "
        "DP group has size 1 (EP=DP or DP=1) with optim_grads_params",
        did="On one rank the sum was added to itself: gradients doubled with every micro-batch.",
        check="gradients",
        first=r"the gradient of blocks.3 from backward run 0 .*is added twice",
        operation="`reduce.sum_into`",
        changes=(
            Change(ShardedGradient.slot.fget, "self.slots and not accumulate", "self.slots"),
            Change(
                WholeGradient.target,
                "position in self.written",
                "position in self.written or self.group.sharded_gradient.reductions > 0",
            ),
            Change(WholeGradient.reduce, "group.choices.divide_factor == 1", "False"),
        ),
        program=partial(train, batches=3),
        ranks=1,
    ),
    Bug(
        reference="NVIDIA/Megatron-LM#5956",
        title="Divide expert gradients by the expert-parallel size",
        did="Gradients of experts were too large, by the number of ranks that the experts are spread over.",
        check="gradients",
        first=r"the gradient of blocks.0.moe.experts from backward run 0 .*1/2, not 1/4",
        operation="`adamw.step`",
        changes=(
            Change(
                SplitModules.data_ranks,
                "*(data_of(placement, mesh) for placement in placements)",
                "mesh.axes",
            ),
        ),
        program=train_experts,
        ranks=4,
    ),
    Bug(
        reference="NVIDIA-NeMo/Automodel#3135",
        title="fix(moe): preserve HSDP replica gradient synchronization",
        did="The group of replicas got lost, so gradients were summed inside each replica alone.",
        check="gradients",
        first=r"the gradient of \S+ from backward run 0 is the sum over ranks 0, 1, not over 0, 1, 2, 3",
        operation="`adamw.step`",
        changes=(
            Change(
                process_groups.communicators_of,
                'mesh.axis(0) if shard_over == "last axis" else None',
                "None",
            ),
        ),
        program=partial(train, **HYBRID),
        ranks=4,
    ),
    Bug(
        reference="NVIDIA/Megatron-LM#950",
        title="[BUG] when use --use-mcore-models and --overlap-param-gather bug",
        did="Forward computed with the weights of the step before.",
        check="gradients",
        first=STALE.format(1, 0),
        operation="`embedding.forward`",
        changes=(Change(Gathers.refresh, "self._release(unit)", "pass"),),
        program=partial(train, strategy="SHARD_OPT"),
    ),
    Bug(
        reference="PrimeIntellect-ai/prime-rl#2562",
        title="fix(rl): normalize loss by global token count across dp_cp",
        did="Ranks with fewer tokens gave each of their tokens more weight.",
        check="gradients",
        first=r"a position of the loss at \S+ has the weight 1/16 .* and 1/8",
        operation="`adamw.step`",
        changes=(Change(programs.count_of, "sum(counts)", "counts[rank]"),),
        program=programs.train_on_unequal_counts,
        each=True,
    ),
]

# More than the twenty: the checks do not find all of them yet.
MORE = [
    Bug(
        reference="pytorch/torchtitan#2318",
        title="Disable DDP averaging to avoid repeated gradient averaging",
        did="Gradients were divided by the number of data ranks twice.",
        check="gradients",
        first=r"the gradient of \S+ from backward run 0 has the weight 1/16",
        operation="`adamw.step`",
        changes=(Change(collectives.reduce_scatter, "scale if in_place else 1.0", "scale"),),
        program=partial(train, **HYBRID),
        ranks=4,
    ),
    Bug(
        reference="NVIDIA/Megatron-LM#1446",
        title="[BUG] final_layernorm gradient mismatch when TP+SP enabled",
        did="Gradients of norms lacked the parts of the other ranks of the tensor axis.",
        check="gradients",
        first=r"the gradient of \S+ .*cut among ranks 0, 1, but it is summed over ranks 0, 2",
        operation="`adamw.step`",
        changes=(Change(SequenceParallel.apply, "partial(parameter, axis)", "pass"),),
        program=partial(train_tensor_parallel, sequence=True),
        ranks=4,
    ),
    Bug(
        reference="pytorch/pytorch#167178",
        title="fix: use grad div factor when fsdp_degree=1",
        did="Gradients of experts on one rank were too large, by the number of ranks.",
        check="gradients",
        first=r"the gradient of \S+ from backward run 0 is the sum over ranks 0, not over 0, 1",
        operation="`adamw.step`",
        changes=(
            Change(
                WholeGradient.reduce,
                "in_place and group.ranks.replicate is None and group.choices.divide_factor == 1",
                "in_place",
            ),
        ),
        program=partial(train, strategy="NO_SHARD"),
    ),
    Bug(
        reference="deepspeedai/DeepSpeed#7130",
        title="[bugfix] update results of state_dict loading, embedding resizing to secondary partitions "
        "(hpz)",
        did="A load wrote the shards, and forward went on with a second copy of the old values.",
        check="gradients",
        first=STALE.format(2, 1),
        operation="`embedding.forward`",
        changes=(
            Change(LowPrecisionTransfer.shard_written, "self.is_fresh = self.is_fresh and copy_too", "pass"),
        ),
        program=load_between,
    ),
]
