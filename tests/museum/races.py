"""Bugs in which a stream doesn't wait for another."""

from functools import partial

from shardrt.activation_offload import SavedTensors, offload_activations
from shardrt.fsdp import CPUOffloadPolicy, collectives, fully_shard, no_sync
from shardrt.fsdp.gradients import Gradients
from shardrt.fsdp.sharded_gradient import ShardedGradient
from shardrt import functional as F, optim
from shardrt.comm import init_device_mesh
from tests.museum.programs import TOKENS, loss_of
from shardrt.fsdp.gradient_path import GradientPath
from shardrt.fsdp.options.offload import HostGradient, UploadedTransfer
from shardrt.optim.offload import Updates
from tests.museum.bug import Bug, Change
from tests.museum.programs import Net, train



RACES = [
    Bug(
        "pytorch/pytorch#180665",
        "[FSDP2] Fix HSDP + CPUOffloadPolicy grad corruption race, add stream-behavior tests",
        "30 to 60% of the backward passes left wrong gradients on the host.",
        "races",
        (Change(HostGradient._through, "streams.download.record(staged.free)", "streams.reduce.record(staged.free)"),),
        partial(train, (2, 2), strategy="HYBRID_SHARD", offload_policy=CPUOffloadPolicy(parameters=False, optimizer_state=False)),
        "zzz",
        4,
    ),
    Bug(
        "deepspeedai/DeepSpeed#5606",
        "Fix overlap communication of ZeRO stage 1 and 2",
        "Backward wrote the next gradients into a buffer that a reduction was still reading.",
        "races",
        (Change(GradientPath.acquire, "compute.wait(slot.free)", "pass"),),
        train,
        "zzz",
    ),
    Bug(
        "pytorch/pytorch#180666",
        "[FSDP2] Fix post_accumulate_grad_hook staleness under CPUOffloadPolicy",
        "A hook read gradients on the host before they had arrived.",
        "races",
        (Change(Updates.issue, "stream.wait(piece.storage.gradient_ready)", "pass"),),
        partial(train, offload_policy=CPUOffloadPolicy(step="host"), in_backward=True),
        "zzz",
    ),
    Bug(
        "deepspeedai/DeepSpeed#5216",
        "[zero++] Synchronize at the end of secondary partitioning and simplify the logic",
        "An all-gather sent shards that a copy in another stream had not filled yet: losses were zero.",
        "races",
        (Change(UploadedTransfer.fill, "streams.gather.wait(self.arrived)", "pass"),),
        partial(train, offload_policy=CPUOffloadPolicy()),
        "zzz",
    ),
    Bug(
        "NVIDIA/Megatron-LM#7398",
        "[Bug] Fine-grained activation offloading: the inline reload in tensor_pop races its own D2H",
        "Saved activations came back before their copies to the host had ended.",
        "races",
        (Change(SavedTensors.fetch, "streams.fetch.wait(host.ready)", "pass"),),
        partial(train, model=lambda: offloaded()),
        "zzz",
    ),
]


RACES += [
    Bug(
        "pytorch/pytorch#181218",
        "FSDP2 chunked-loss ROCm race: stream-level wait_event at post_backward exit",
        "The kernel that adds a reduction's result was not waited for, and the next chunk's backward wrote over what it read.",
        "races",
        (
            Change(collectives.reduce_scatter, "        streams.reduce.submit(streams.device.kernels.reduce.sum_into, out, [output], scale, accumulate)",
            "        streams.reduce.record(slot.free); streams.reduce.submit(streams.device.kernels.reduce.sum_into, out, [output], scale, accumulate)"),
            Change(ShardedGradient.receive, "streams.reduce.record(slot.free)", "pass"),
        ),
        partial(train, (2, 2), strategy="HYBRID_SHARD", batches=2),
        "zzz",
        4,
    ),
    Bug(
        "NVIDIA/Megatron-LM#5222",
        "Fix wgrad race condition when using double buffers",
        "Backward wrote a buffer that a reduction still read: reduced gradients were slightly wrong.",
        "races",
        (Change(ShardedGradient.receive, "streams.reduce.record(slot.free)", "streams.compute.record(slot.free)"),),
        partial(train, strategy="SHARD_GRAD_OP"),
        "zzz",
    ),
]


def offloaded():
    net = Net()
    for block in net.blocks:
        offload_activations(block)
    return net
