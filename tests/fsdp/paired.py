"""The net of the pairs of features, and how it is trained with the options that the features are.

The net has attention, and experts, only for features that are about them.
"""

from contextlib import nullcontext
from functools import partial

import numpy as np

import shardrt
from models.attend import attend
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.activation_offload import offload_activations
from shardrt.checkpoint import full_state_dict, load, save
from shardrt.comm import init_device_mesh, objects
from shardrt.deferred_gradients import DeferredGradients
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    no_sync,
    register_forward_method,
    set_world_invariant,
)
from shardrt.nn.utils import clip_grad_norm_, clip_grad_value_
from shardrt.optim import low_bit
from shardrt.parallel import (
    ColwiseParallel,
    ContextParallel,
    DiLoCo,
    ExpertParallel,
    Pipeline,
    RowwiseParallel,
    SequenceParallel,
    TokenParallel,
    VocabParallel,
    parallelize_module,
    set_tensor_invariant,
    shard_sequence,
)
from shardrt.recompute import checkpoint

BATCH = 24
# Of two ranks, for these options:
AXES = {"diloco": "diloco", "pipeline": "pp", "context": "cp", "parallel": "tp"}
ALONE = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_GRAD_OP": "SHARD_GRAD_OP"}  # on an axis of its own


class Attention(nn.Module):
    """Causal, two heads."""

    context = None

    def __init__(self):
        super().__init__()
        # Keys have no bias: its gradient is 0 up to rounding, of which AdamW makes whole steps.
        self.qkv = nn.Linear(7, 3 * 6, bias=False)
        self.output = nn.Linear(6, 7)

    def forward(self, x, positions):
        qkv = self.qkv(x)
        heads = qkv.shape[-1] // 9
        return self.output(attend(qkv, heads, heads, context=self.context, positions=positions))


class Block(nn.Module):
    """Linear, GELU, linear, dropout; few ranks divide their sizes. There may be attention before them."""

    def __init__(self, dropout, attention=False):
        super().__init__()
        if attention:
            self.attention = Attention()
        self.up = nn.Linear(7, 14)
        self.down = nn.Linear(14, 7)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, positions=None):
        if hasattr(self, "attention"):
            x = x + self.attention(x, positions)
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Routed(nn.Module):
    """Experts in the place of both linears. The router's loss is a second output.

    That is a mean over tokens, and a bias counts in integers: both are the same however tokens are cut.
    """

    def __init__(self, dropout):
        super().__init__()
        router = nn.TopKRouter(7, 4, 2, balance_loss=0.0, z_loss=0.1, expert_bias=True)
        self.moe = nn.MoE(router, nn.Experts(4, 7, 6))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, positions=None):
        y, loss = self.moe(x)
        return x + self.dropout(F.cast(y, x.value_dtype.name)), loss  # as in Net.headed


class Net(nn.Module):
    """Embedding, blocks of which some may be left out, norm, and a head tied to the embedding."""

    def __init__(self, dropout, attention=False, experts=False):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(
            Routed(dropout) if experts and number == 2 else Block(dropout, attention and number % 2 == 1)
            for number in range(4)
        )
        self.norm = nn.LayerNorm(7)
        self.left_out = None

    def forward(self, tokens, positions=None):
        x = self.embed(tokens)
        for number in range(len(self.blocks)):
            x = self.block(number, x, positions)
        return self.headed(x)

    def block(self, number, given, positions):
        """x, or with the loss of a router; so is what is given."""
        if number == self.left_out:
            return given
        x, *loss = given if isinstance(given, tuple) else (given,)
        y = self.blocks[number](x, positions)
        return (y, *loss) if loss else y

    def headed(self, given):
        x, *loss = given if isinstance(given, tuple) else (given,)
        # On a GPU units may give out 16 bits that others do not compute in (bf16 output), as in PyTorch.
        x = self.norm(F.cast(x, self.norm.weight.data.dtype.name))
        head = self.embed.weight
        x, words = F.cast(x, head.data.dtype.name), head.words
        logits = F.linear(x, head) if words is None else words.logits(x, head)
        return (logits, *loss) if loss else logits

    def score(self, tokens, positions=None):
        return self.forward(tokens, positions)

    def pieces(self):
        def block(number, x, batch):
            return self.block(number, x, batch.get("positions"))

        blocks = (nn.Piece(b.name, partial(block, number), (b,)) for number, b in enumerate(self.blocks))
        return [
            nn.Piece("embed", lambda x, batch: self.embed(batch["tokens"]), (self.embed,)),
            *blocks,
            nn.Piece("head", lambda x, batch: self.headed(x), (self.norm,), tied=(self.embed,)),
        ]


def loss_of(given, targets):
    """The mean over positions, from what the net gives."""
    logits, *router = given if isinstance(given, tuple) else (given,)
    loss = F.cross_entropy(logits, targets)
    return loss + F.cast(router[0], "float32") if router else loss


def plan_for(options):
    """How the modules are cut over the ranks of "tp"."""
    plan = {
        "embed": VocabParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    if "attention" in options:
        plan |= {"blocks.*.attention.qkv": ColwiseParallel(3), "blocks.*.attention.output": RowwiseParallel()}
    if "sequence" in options.get("parallel", []):
        plan |= {"norm": SequenceParallel(), "blocks.*.dropout": SequenceParallel()}
    if "experts" in options and "parallel" in options:
        plan["blocks.2.moe"] = TokenParallel()
    return plan


def of_unit(options, index, directory):
    """Arguments of fully_shard. Of two values of an option, every other unit has one, the rest the other."""

    def value(key, default=None):
        values = options.get(key, [default])
        return values[index % len(values)]

    offload = value("offload")
    if offload is not None and "directory" in offload:
        offload = {"directory": directory}
    return {
        "strategy": value("strategy", "FULL_SHARD"),
        "reshard_after_forward": value("reshard_after_forward"),
        "prefetch": value("prefetch", 1),
        "offload_policy": None if offload is None else CPUOffloadPolicy(**offload),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=value("param_dtype"),
            reduce_dtype=value("reduce_dtype"),
            output_dtype=value("output_dtype"),
            quantised=value("quantised"),
        ),
    }


def mesh_for(options, device):
    """Of all ranks: an axis for the data, or two of a hybrid, and others for what is cut in other ways."""
    two_axes = any(name.startswith("HYBRID") for name in options.get("strategy", []))
    others = [name for option, name in AXES.items() if option in options]
    # Over NCCL, which a rank with a GPU of its own takes, sums in a fixed order are those by the tree.
    reduction = "tree" if options.keys() & {"invariant", "tensor_invariant"} else "nccl"
    if not others and not spread(options):
        return init_device_mesh(device, (2, 2) if two_axes else None, reduction=reduction)
    shards = init_device_mesh(device).size // 2 ** (len(others) + two_axes)
    sizes = {"diloco": 2, "pp": 2, "dp_replicate": 2 * two_axes, "dp_shard": shards, "cp": 2, "tp": 2}
    sizes = {name: size for name, size in sizes.items() if size and (name in others or name[:2] == "dp")}
    return init_device_mesh(device, tuple(sizes.values()), tuple(sizes), reduction=reduction)


def spread(options):
    """Whether experts are on several ranks."""
    return "spread" in options.get("experts", [])


def rows_of(mesh):
    """Its axes of the rows: ranks of all others have the same."""
    names = mesh.mesh_dim_names
    return mesh if names is None else mesh[tuple(name for name in names if name[:2] == "dp")]


def data_of(mesh):
    """The ranks over which gradients are summed: of the rows, and of the time."""
    names = mesh.mesh_dim_names or ()
    if "cp" not in names:
        return rows_of(mesh)
    if "dp_replicate" not in names:
        return mesh.flat("dp_shard", "cp")
    over = ("dp_replicate", "dp_shard", "cp")
    return mesh.fold("shards", 2 * mesh.size_of("dp_shard"), over=over, rest="dp_replicate")


def fold_of(mesh):
    """The ranks with parts of the tokens as "efsdp" x "ep"."""
    return mesh.fold(
        "ep", 2, over=tuple(name for name in mesh.mesh_dim_names if name not in ("diloco", "pp"))
    )


def build(options, mesh, directory):
    """(model, its Pipeline or None)."""
    shardrt.manual_seed(3)
    model = Net(*options.get("dropout", [0.0]), "attention" in options, "experts" in options)
    if "parallel" in options:
        parallelize_module(model, mesh["tp"], plan_for(options))
    if "context" in options:
        parallelize_module(model, mesh["cp"], {"blocks.*.attention": ContextParallel()})
    if spread(options):
        parallelize_module(model, fold_of(mesh)["ep"], {"blocks.2.moe.experts": ExpertParallel()})
    if "tensor_invariant" in options:
        set_tensor_invariant(model, 2, plan=None if "parallel" in options else plan_for(options))
    if "frozen" in options:
        for parameter in (*model.blocks[1].parameters(), model.blocks[0].up.bias):
            parameter.requires_grad = False
    recompute(model.blocks, options.get("recompute", []))
    for block in model.blocks if "offload_activations" in options else ():
        offload_activations(block)
    pipeline = None
    if "pipeline" in options:
        # One micro-batch where each has masks of its own: then they are those of the whole batch.
        count = 1 if "dropout" in options else 2
        schedule = "ZB-H1" if "late" in options else "1F1B"
        pipeline = Pipeline(model, mesh["pp"], schedule=schedule, micro_batches=count)
    shard(options, model, pipeline.stages if pipeline else [model], mesh, directory)
    if "forward_method" in options:
        register_forward_method(model, "score")
    if "invariant" in options:
        set_world_invariant(model, rows_of(mesh).size * len(turns(options)))
    return model, pipeline


def shard(options, model, wholes, mesh, directory):
    """Units of the blocks, of experts, and of what is around them, that this rank has; or one of all."""
    data, parts, several = data_of(mesh), [[block] for block in model.blocks], "one_unit" not in options
    if "unit_of_two" in options:
        parts[:2] = [parts[0] + parts[1]]
    for index, part in enumerate(parts):
        if any(parameter.absent for block in part for parameter in block.parameters()):
            continue
        how = of_unit(options, index, directory)
        if isinstance(part[0], Routed) and (several or spread(options)):
            ranks, own = data, how
            if spread(options):
                ranks = fold_of(mesh)["efsdp"]
                own = how | {"strategy": ALONE.get(how["strategy"], how["strategy"])}
            fully_shard(part[0].moe.experts, mesh=ranks, **own)
        if several:
            fully_shard(part, mesh=data, **how)
    ignored = [model.norm] if "ignored" in options else []
    for whole in wholes:
        fully_shard(whole, mesh=data, ignored=ignored, **of_unit(options, len(parts), directory))


def recompute(blocks, policies):
    """One policy for all blocks, or two in turns; "every second" leaves its others to the other policy."""
    turns = sorted(policies)  # "every second" first
    if turns and turns[0] == "every second":
        turns = ["full", *(turns[1:] or [None])]
    for index, block in enumerate(blocks):
        if turns and turns[index % len(turns)]:
            checkpoint(block, turns[index % len(turns)])


def train(options, directory=None, device="cpu"):
    """(losses of three steps, weights on rank 0), on this rank."""
    mesh = mesh_for(options, device)
    data, rows = data_of(mesh), rows_of(mesh)
    model, pipeline = build(options, mesh, directory)
    run = backward if pipeline is None else partial(by_stages, pipeline)
    optimizer = optimizer_of(options, model)
    outer = None
    if "diloco" in options:  # hosts have the same rows, so outer steps that average change little
        outer = DiLoCo(optimizer, mesh["diloco"], sync_every=1, lr=1.0, momentum=0.0)
    scaler = optim.GradScaler(init_scale=2.0**10, enabled="scaler" in options)
    losses = []
    for step, batch in enumerate(batches(rows, options)):
        if "unused" in options:  # at first all are used; then some ranks leave one out, then all do
            model.left_out = {1: 1 if rows.rank % 2 else None, 2: 2}.get(step)
        losses.append(run(model, options, scaler, *batch, cut_of(mesh)))
        average_ignored(model, data, options)
        scaler.unscale_(optimizer)
        for norm in options.get("clip_norm", ()):
            clip_grad_norm_(model.parameters(), norm)
        for value in options.get("clip_value", ()):
            clip_grad_value_(model.parameters(), value)
        scaler.step(optimizer)
        scaler.update()
        if "experts" in options:
            nn.update_expert_bias(model, 0.01)
        optimizer.zero_grad()
        if outer is not None:
            outer.step(step + 1)
        if step == 1 and "save_and_load" in options:
            save_and_load(model, mesh, directory)
    return losses, full_state_dict(model)


def optimizer_of(options, model):
    """Of the kind that is asked for; AdamW without."""
    (kind,) = options.get("optimizer", ["AdamW"])
    more = {"in_backward": True} if "in_backward" in options else {}
    if kind == "Muon":
        return optim.Muon(optim.muon_groups(model, 0.01), lr=1e-2, **more)
    if kind == "SGD":
        return optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **more)
    kinds = {"AdamW": optim.AdamW, "8-bit": low_bit.AdamW8bit, "bf16": low_bit.AdamWBF16}
    return kinds[kind](model.parameters(), lr=1e-2, **more)


def batches(rows, options=()):
    """This rank's rows of the whole batch of every step: (tokens, targets)."""
    random, time = np.random.default_rng(0), 4 if "attention" in options else 2
    own = slice(BATCH * rows.rank // rows.size, BATCH * (rows.rank + 1) // rows.size)
    return [random.integers(0, 11, (2, BATCH, time))[:, own] for _ in range(3)]


def cut_of(mesh):
    """What gives (tokens, targets, positions) that this rank has of rows."""
    if "cp" in (mesh.mesh_dim_names or ()):
        return lambda tokens, targets: shard_sequence(tokens, targets, mesh=mesh["cp"])[:3]
    return lambda tokens, targets: (tokens, targets, None)


def backward(model, options, scaler, tokens, targets, cut):
    """The loss of all micro-batches. The last of them reduces, whatever those before it do.

    With "late" in options, weight gradients that are not reduced wait until the next micro-batch's wait too.
    """
    ways = turns(options)
    added = shardrt.fsdp.units(model)[0].settings.mesh.size if "invariant" in options else 1
    total, waiting = 0.0, []
    parts = zip(np.array_split(tokens, len(ways)), np.array_split(targets, len(ways)), strict=True)
    for way, part in zip(ways, parts, strict=True):
        tokens, targets, positions = cut(*part)
        with no_sync(model) if way == "no_sync" else nullcontext():
            call = model.score if "forward_method" in options else model
            loss = loss_of(call(tokens, positions), targets) * (1 / len(ways))
            late = DeferredGradients() if "late" in options else None
            scaler.scale(loss * (1 / added)).backward(deferred=late)
            for earlier in waiting:
                with no_sync(model):
                    earlier.flush()
            waiting = [] if late is None else [late]
            if waiting and way == "reduce":
                waiting.pop().flush()
        total += float(loss.item())
    return total


def by_stages(pipeline, model, options, scaler, tokens, targets, cut):
    """The same by steps of a pipeline, each of some micro-batches."""
    ways, count, message = turns(options), pipeline.table.micro_batches, []

    def weighted(output, batch):
        _, targets, _, weight = batch
        loss = loss_of(output, targets) * weight
        message.append(float(loss.item()))
        return scaler.scale(loss)

    rows = list(zip(np.array_split(tokens, len(ways)), np.array_split(targets, len(ways)), strict=True))
    for way, (own, wanted) in zip(ways, rows, strict=True):
        parts = zip(np.array_split(own, count), np.array_split(wanted, count), strict=True)
        with no_sync(model) if way == "no_sync" else nullcontext():
            steps = [(*cut(x, y), len(x) / (len(own) * len(ways))) for x, y in parts]
            pipeline.step(weighted, steps, inputs=lambda batch: (batch[0], batch[2]))
    return sum(sum(objects.all_gather_object(pipeline.mesh.communicator("control"), message), []))


def turns(options):
    """What becomes of the gradients of each micro-batch."""
    return [way for values in options.get("micro_batches", ()) for way in values] + ["reduce"]


def average_ignored(model, mesh, options):
    """Nobody reduces the gradients of what is ignored, so whoever trains it must."""
    for parameter in model.norm.parameters() if "ignored" in options else ():
        if parameter.absent:
            continue
        gradient = parameter.grad
        mesh.communicator("control").all_reduce(gradient, stream=mesh.device.current_stream)
        gradient /= mesh.size


def save_and_load(model, mesh, directory):
    """Write a checkpoint, a host of DiLoCo its own; spoil the model; read it back."""
    host = mesh.rank_of("diloco") if "diloco" in (mesh.mesh_dim_names or ()) else 0
    folder = directory / f"checkpoint {host}"
    save(folder, model)
    for parameter in model.parameters():
        with parameter.writing() as shard:
            shard.fill(7.0)
    for _, buffer in model.named_buffers():
        buffer.fill(7.0)
    mesh.communicator("control").barrier(stream=mesh.device.current_stream)
    load(folder, model)
