from contextlib import nullcontext

from shardrt.fsdp import no_sync


def accumulate(model, parts, loss_of):
    last = len(parts) - 1
    for number, part in enumerate(parts):
        with nullcontext() if number == last else no_sync(model):
            (loss_of(part) * (1 / len(parts))).backward()
