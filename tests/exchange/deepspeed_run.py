"""Trains a small network with the real DeepSpeed: saves, or loads and goes on; keeps the true values.

    DS_ACCELERATOR=cpu python -m torch.distributed.run --nproc-per-node 2 --master-port 29500 \
        tests/exchange/deepspeed_run.py --stage 3 --steps 3 --save FOLDER

With --load FOLDER the run begins there. Steps are counted from 1; those from --steps of the loaded checkpoint
on use the same data as a run that was not stopped. `--truth FILE.npz` gets each parameter and its moments
after loading (or, with --save, when the checkpoint is saved), and `--after FILE.npz` the weights at the end.
"""

import argparse

import deepspeed
import numpy as np
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


class Net(torch.nn.Module):
    """An embedding, a linear layer, a norm, and an output layer: 298 parameters."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 6)
        self.a = torch.nn.Linear(6, 10)
        self.norm = torch.nn.LayerNorm(10)
        self.b = torch.nn.Linear(10, 13, bias=False)
        if tied:
            self.c = torch.nn.Linear(10, 13, bias=False)
            self.c.weight = self.b.weight
        self.register_buffer("scale", torch.full((1,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(torch.tanh(self.a(self.embed(x)))))


def data(step: int, rank: int) -> torch.Tensor:
    """The tokens of a step, without a random generator: other programs make the same."""
    return torch.tensor(
        [[(7 * step + 5 * rank + 3 * row + column * column) % 13 for column in range(5)] for row in range(2)]
    )


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--truth")
    parser.add_argument("--after")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--zero", default="{}", help="more of zero_optimization, JSON")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--one-group", action="store_true")
    parser.add_argument("--no-scheduler", action="store_true")
    args = parser.parse_args()
    import json

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    torch.manual_seed(0 if args.save else 1)
    net = Net(args.tied)
    net.a.weight.requires_grad = not args.frozen
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    if args.one_group:
        groups = [{"params": [p for _, p in named], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": args.stage, "stage3_param_persistence_threshold": 0, **json.loads(args.zero)
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1000,
    }  # fmt: skip
    if args.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if args.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    engine, _, _, _ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=None if args.no_scheduler else scheduler, config=config
    )
    if args.load:
        path, client = engine.load_checkpoint(args.load)
        assert path, args.load
        if args.truth:
            keep(engine, args.truth, rank)
    for step in range(engine.global_steps + 1, args.steps + 1):
        tokens = data(step, rank)
        logits = engine(tokens).flatten(0, 1).float()
        engine.backward(torch.nn.functional.cross_entropy(logits, tokens.flatten()))
        engine.step()
    if args.save:
        engine.save_checkpoint(args.save, client_state={"note": "hello", "step": args.steps})
        if args.truth:
            keep(engine, args.truth, rank, args.save)
    if args.after:
        keep(engine, args.after, rank)


def keep(engine: deepspeed.DeepSpeedEngine, path: str, rank: int, saved: str | None = None) -> None:
    """Write each parameter and its moments, as DeepSpeed gives them; and the weights of a folder saved."""
    found = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # or stages 1 and 2 have no moments
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    masters = dict(_masters(engine.optimizer))
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            if hasattr(parameter, "ds_id"):
                with deepspeed.zero.GatheredParameters([parameter]):
                    found[f"parameter/{name}"] = parameter.detach().float().numpy().copy()
            else:
                found[f"parameter/{name}"] = parameter.detach().float().numpy().copy()
            continue
        for kind in ("parameter", "exp_avg", "exp_avg_sq"):
            if not engine.zero_optimization():
                master = masters.get(parameter, parameter)
                value = master if kind == "parameter" else engine.optimizer.state[master][kind]
                found[f"{kind}/{name}"] = value.detach().float().numpy().copy()
                continue
            value = (
                safe_get_full_fp32_param(parameter)
                if kind == "parameter"
                else safe_get_full_optimizer_state(parameter, kind)
            )
            if value is not None:
                found[f"{kind}/{name}"] = value.detach().float().numpy().copy()
    found["lr"] = np.array([group["lr"] for group in engine.optimizer.param_groups])
    found["global_steps"] = np.array(engine.global_steps)
    if rank == 0:
        if saved and engine.zero_optimization():
            weights = get_fp32_state_dict_from_zero_checkpoint(saved)
            found |= {f"fp32/{name}": value.detach().float().numpy() for name, value in weights.items()}
        np.savez_compressed(path, **found)


def _masters(optimizer):
    """Stage 0 with 16 bits: (parameter, its float32 weights)."""
    for halves, floats in zip(
        getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=False
    ):
        yield from zip(halves, floats, strict=True)


if __name__ == "__main__":
    main()
