"""How parallelize_module splits the models here: a plan for each."""

from shardrt import nn
from shardrt.parallel import (
    ColwiseParallel,
    HeadParallel,
    RowwiseParallel,
    SequenceParallel,
    TokenParallel,
    VocabParallel,
)
from shardrt.parallel.styles import Style

from .gpt import GPT
from .llama import Llama
from .vit import ViT

__all__ = ["plan_of"]


def plan_of(model: nn.Module, *, sequence_parallel: bool = False) -> dict[str, Style]:
    """The plan for a GPT, Llama or ViT: attention by heads, MLPs by hidden units, the vocabulary by words.

    Experts are whole on each rank, which has a part of the tokens there; ExpertParallel can split them too.

    sequence_parallel: norms, dropout and what lies between the blocks on a part of the time each; less memory
    for the same traffic. For language models. Raises TypeError for another model, ValueError for a ViT with
    sequence_parallel, and a Llama with a norm of all queries or keys at once.
    """
    plan = {
        "blocks.*.attention.qkv": ColwiseParallel(_heads(model)),
        "blocks.*.attention.output": RowwiseParallel(),
        **_mlps(model),
    }
    if isinstance(model, ViT):
        if sequence_parallel:
            raise ValueError(
                "plan_of: sequence_parallel is not supported for a ViT, which reads all patches at once"
            )
        return plan
    if isinstance(model, GPT):
        plan |= {"wte": VocabParallel()}
        alone = ("wpe", "dropout", "blocks.*.dropout")
    else:
        if model.config.qk_norm == "all":
            raise ValueError(
                "plan_of: a model with qk_norm='all' can't be split, since its norm reads all heads at once"
            )
        if model.config.qk_norm == "head":
            plan |= {f"blocks.*.attention.{norm}": HeadParallel() for norm in ("q_norm", "k_norm")}
        plan |= {"embedding": VocabParallel()}
        plan |= {} if model.config.tied else {"head": VocabParallel()}
        alone = ()
    if sequence_parallel:
        norms = ("blocks.*.norm1", "blocks.*.norm2", "norm")
        plan |= {path: SequenceParallel() for path in (*alone, *norms)}
    return plan


def _mlps(model: nn.Module) -> dict[str, Style]:
    if not isinstance(model, Llama):
        return {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
    if model.config.experts:
        return {"blocks.*.mlp": TokenParallel()}
    return {"blocks.*.mlp.gate_up": ColwiseParallel(2), "blocks.*.mlp.down": RowwiseParallel()}


def _heads(model: nn.Module) -> tuple[int, int, int]:
    """Of queries, keys and values."""
    if not isinstance(model, GPT | Llama | ViT):
        raise TypeError(f"plan_of: model must be a GPT, Llama or ViT, got {type(model).__name__}")
    config = model.config
    kv_heads = config.n_kv_head if isinstance(model, Llama) else config.n_head
    return config.n_head, kv_heads, kv_heads
