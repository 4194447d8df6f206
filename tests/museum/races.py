"""Bugs in which a stream doesn't wait for another."""

from functools import partial

from shardrt.activation_offload import SavedTensors
from shardrt.fsdp import CPUOffloadPolicy, collectives
from shardrt.fsdp.gradient_path import GradientPath
from shardrt.fsdp.options.offload import HostGradient, UploadedTransfer
from shardrt.fsdp.sharded_gradient import ShardedGradient
from shardrt.optim.offload import Updates
from tests.museum.bug import Bug, Change
from tests.museum.programs import offloaded, train

__all__ = ["RACES"]

HYBRID = {"shape": (2, 2), "strategy": "HYBRID_SHARD"}
GRADIENTS_ON_HOST = CPUOffloadPolicy(parameters=False, optimizer_state=False)

RACES = [
    Bug(
        reference="pytorch/pytorch#180665",
        title="[FSDP2] Fix HSDP + CPUOffloadPolicy grad corruption race, add stream-behavior tests",
        did="A reduction wrote a buffer while its last gradient was still on its way to the host.",
        check="races",
        first=r"race.*\n.* copy download blocks.3 reads.*\n.* reduce: reduce.sum_into writes",
        operation="`sum_into` writes, the copy `download` reads",
        changes=(
            Change(
                HostGradient._through,
                "streams.download.record(staged.free)",
                "streams.reduce.record(staged.free)",
            ),
        ),
        program=partial(train, **HYBRID, offload_policy=GRADIENTS_ON_HOST),
        ranks=4,
    ),
    Bug(
        reference="pytorch/pytorch#181218",
        title="FSDP2 chunked-loss ROCm race: stream-level wait_event at post_backward exit",
        did="The next chunk's backward wrote memory that the kernel behind a reduction still read.",
        check="races",
        first=r"race.*\n.* reduce: reduce.sum_into reads.*\n.* linear.backward_parameters",
        operation="`linear.backward_parameters` writes, `sum_into` reads",
        changes=(
            Change(
                collectives.reduce_scatter,
                "submit(streams.device.kernels.reduce.sum_into, out,",
                "record(slot.free), streams.reduce.submit(streams.device.kernels.reduce.sum_into, out,",
            ),
            Change(ShardedGradient.receive, "streams.reduce.record(slot.free)", "pass"),
        ),
        program=partial(train, **HYBRID, batches=2),
        ranks=4,
    ),
    Bug(
        reference="deepspeedai/DeepSpeed#5606",
        title="Fix overlap communication of ZeRO stage 1 and 2",
        did="Backward wrote one of two alternating buffers while a reduction still read it.",
        check="races",
        first=r"race.*\n.* reduce_scatter blocks.3 reads.*\n.* linear.backward_parameters",
        operation="`linear.backward_parameters` writes, `reduce_scatter` reads",
        changes=(Change(GradientPath.acquire, "compute.wait(slot.free)", "pass"),),
        program=train,
    ),
    Bug(
        reference="pytorch/pytorch#180666",
        title="[FSDP2] Fix post_accumulate_grad_hook staleness under CPUOffloadPolicy",
        did="An optimizer in backward read gradients in host memory before they had arrived.",
        check="races",
        first=r"race.*\n.* copy download blocks.3 writes.*\n.* adamw.step update blocks.3.* reads",
        operation="`adamw.step` reads, `download` writes",
        changes=(Change(Updates.issue, "stream.wait(piece.storage.gradient_ready)", "pass"),),
        program=partial(train, in_backward=True, offload_policy=CPUOffloadPolicy(step="host")),
    ),
    Bug(
        reference="deepspeedai/DeepSpeed#5216",
        title="[zero++] Synchronize at the end of secondary partitioning and simplify the logic",
        did="An all-gather sent shards before a copy in another stream had filled them; the loss was 0.",
        check="races",
        first=r"race.*\n.* upload: copy upload \(root\) writes.*\n.* all_gather \(root\) reads",
        operation="`all_gather` reads, `upload` writes",
        changes=(Change(UploadedTransfer.fill, "streams.gather.wait(self.arrived)", "pass"),),
        program=partial(train, offload_policy=CPUOffloadPolicy()),
    ),
    Bug(
        reference="NVIDIA/Megatron-LM#7398",
        title="[Bug] Fine-grained activation offloading: the inline reload in `tensor_pop` races its own "
        "D2H, corrupting the warmup iteration",
        did="Activations came back from the host before their copy to the host had ended.",
        check="races",
        first=r"race.*\n.* copy offload blocks.2 writes.*\n.* copy fetch blocks.2 reads",
        operation="`fetch` reads, `offload` writes",
        changes=(Change(SavedTensors.fetch, "streams.fetch.wait(host.ready)", "pass"),),
        program=partial(train, make=offloaded),
    ),
    Bug(
        reference="NVIDIA/Megatron-LM#6187",
        title="Allocate main_grad on the reduce-scatter stream",
        did="Gradients were of the default stream's pool, and freed while a reduce-scatter read them.",
        check="races",
        first=r"race.*\n.* reduce_scatter blocks.3 reads.*\n.* Free gives back",
        operation="the memory is given back, `reduce_scatter` reads",
        changes=(
            Change(
                GradientPath.acquire,
                "compute.wait(slot.free)",
                'slot.views, slot.array = {}, self.group.memory.device.empty(len(slot.array), "float32")',
            ),
            Change(
                GradientPath.handing_over.__wrapped__,
                "slot.give_back()",
                "slot.views, slot.array, _ = {}, range(len(slot.array)), slot.give_back()",
            ),
        ),
        program=partial(train, strategy="SHARD_GRAD_OP"),
    ),
]
