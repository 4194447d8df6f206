"""A program of PyTorch's: FSDP2 on a small Llama whose checkpoints are named and laid out as torchtitan's.

    python -m torch.distributed.run ... titan_run.py FOLDER FROM TO

trains from step FROM (0: from the beginning) to step TO, and keeps checkpoint TO and the losses of its steps.
The model is transformers'; keys and rows of queries and keys are turned into torchtitan's words here
(torchtitan 0.3.0, models/llama3/state_dict_adapter.py), not by shardrt.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
HEADS, KV_HEADS, WINDOW, ROWS = 4, 2, 32, 4
WORDS = [  # in this order
    ("model.", ""),
    ("embed_tokens", "tok_embeddings"),
    ("self_attn.q_proj", "attention.qkv_linear.wq"),
    ("self_attn.k_proj", "attention.qkv_linear.wk"),
    ("self_attn.v_proj", "attention.qkv_linear.wv"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
]


def made():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=WINDOW,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config)


def batch(step):
    """The tokens of all ranks."""
    return np.random.default_rng(step).integers(0, 256, (ROWS, WINDOW + 1))


def words(state, there=True):
    """A state dict in torchtitan's names and order of rows, or back."""
    return {_name(name, there): _turned(name, value, there) for name, value in state.items()}


def _name(name, there):
    for theirs, titan in WORDS if there else []:
        name = name.replace(theirs, titan)
    if not there:
        for theirs, titan in reversed(WORDS[1:]):
            name = name.replace(titan, theirs)
        parts = name.split(".")
        at = next(i for i, part in enumerate(parts) if part in ("layers", "embed_tokens", "norm", "lm_head"))
        name = ".".join(parts[:at] + ["model"] * (parts[at] != "lm_head") + parts[at:])
    return name


def _turned(name, value, there):
    matrix = isinstance(value, DTensor) and value.ndim == 2
    heads = {"q_proj.": HEADS, "k_proj.": KV_HEADS, "wq.": HEADS, "wk.": KV_HEADS}
    own = [n for part, n in heads.items() if part in name]
    if not matrix or not own:
        return value
    whole, (rows, columns) = value.full_tensor(), value.shape
    cut = (own[0], 2, rows // own[0] // 2) if there else (own[0], rows // own[0] // 2, 2)
    turned = whole.reshape(*cut, columns).transpose(1, 2).reshape(rows, columns).contiguous()
    return distribute_tensor(turned, value.device_mesh, value.placements)


def main(folder, first, last):
    dist.init_process_group("gloo")
    model = made()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    decayed: list = [[], []]
    for name, parameter in model.named_parameters():
        decayed["norm" in name].append(parameter)
    groups = [{"params": decayed[0], "weight_decay": 0.1}, {"params": decayed[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    if first:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes the state that is loaded into
        state = kept(model, optimizer, 0)
        dcp.load(state, checkpoint_id=folder / f"step-{first}")
        assert state["train_state"]["step"] == first
        weights = {n: v for n, v in state.items() if n not in ("optimizer", "train_state")}
        set_model_state_dict(model, words(weights, there=False))
        set_optimizer_state_dict(model, optimizer, words(state["optimizer"], there=False), options=FLAT)
    losses = [update(model, optimizer, step) for step in range(first, last)]
    dcp.save(kept(model, optimizer, last), checkpoint_id=folder / f"step-{last}")
    if dist.get_rank() == 0:
        (folder / f"losses-{last}.json").write_text(json.dumps(losses))
        model.config.save_pretrained(folder)
    dist.destroy_process_group()


def kept(model, optimizer, step):
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {
        **words(get_model_state_dict(model)),
        "optimizer": words(state),
        "train_state": {"step": step},
    }


def update(model, optimizer, step):
    """The mean loss of all ranks, before the update."""
    optimizer.zero_grad()
    rows = np.split(batch(step), dist.get_world_size())[dist.get_rank()]
    tokens = torch.from_numpy(rows)
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
