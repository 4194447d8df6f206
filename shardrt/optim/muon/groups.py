"""Which parameters of a model are hidden matrices."""

from collections.abc import Iterator
from fnmatch import fnmatch

from shardrt.nn.layers import Embedding
from shardrt.nn.module import Module
from shardrt.optim.optimizer import NO_DECAY

OTHERS = ("*head.weight", "*embed*", "*wte*", "*wpe*", "*lora_*")  # matrices that AdamW updates


def muon_groups(
    module: Module,
    weight_decay: float,
    no_decay: tuple[str, ...] = NO_DECAY,
    others: tuple[str, ...] = OTHERS,
) -> list[dict]:
    """Three parameter groups for Muon: hidden matrices, then AdamW's parameters with and without decay.

    A hidden matrix has two axes, belongs to no Embedding (a tied head does) and has no name in `others`. A
    fused matrix, such as that of queries, keys and values, is one matrix, as in torch.optim.Muon. Experts'
    parameters have three axes and are AdamW's.

    Args:
        module: the model.
        weight_decay: of the hidden matrices and of AdamW's first group.
        no_decay: shell patterns of full parameter names, in lower case, that have no decay.
        others: the same, of matrices that AdamW updates.

    Example:
        >>> from shardrt import nn, optim
        >>> model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8))
        >>> [(len(group["params"]), group["use_muon"]) for group in optim.muon_groups(model, 0.1)]
        [(1, True), (2, False), (2, False)]
    """
    hidden = {"params": [], "weight_decay": weight_decay, "use_muon": True}
    decayed = {"params": [], "weight_decay": weight_decay, "use_muon": False}
    plain = {"params": [], "weight_decay": 0.0, "use_muon": False}
    embedded = {id(parameter) for parameter in _embeddings(module)}
    for name, parameter in module.named_parameters():
        low = name.lower()
        if any(fnmatch(low, pattern) for pattern in no_decay):
            group = plain
        elif parameter.ndim != 2 or id(parameter) in embedded or any(fnmatch(low, each) for each in others):
            group = decayed
        else:
            group = hidden
        group["params"].append(parameter)
    return [group for group in (hidden, decayed, plain) if group["params"]]


def _embeddings(module: Module) -> Iterator[object]:
    for _, each in module.named_modules():
        if isinstance(each, Embedding):
            yield each.weight
