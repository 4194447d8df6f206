"""A program of DeepSpeed's: ZeRO on the small Llama of titan_run.py, in the names of transformers.

    DS_ACCELERATOR=cpu python -m torch.distributed.run ... deepspeed_llama.py FOLDER FROM TO STAGE

trains from step FROM (0: from the beginning) to step TO, and keeps checkpoint TO and the losses of its steps.
"""

import json
import sys
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.exchange.titan_run import ROWS, batch, made


def main(folder: Path, first: int, last: int, stage: int) -> None:
    """Train."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = made()
    named = dict(model.named_parameters())
    names = [[n for n in named if "norm" not in n], [n for n in named if "norm" in n]]
    if first:  # a converted checkpoint says which parameters its groups have, in which order
        saved = sorted((folder / f"global_step{first}").glob("*model_states.pt"))[0]
        names = [list(group) for group in torch.load(saved, weights_only=False)["param_shapes"]]
    groups = [
        {"params": [named[n] for n in of], "weight_decay": 0.0 if "norm" in of[0] else 0.1} for of in names
    ]
    config = {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # the default is 1.0
        "steps_per_print": 1000,
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if first:
        path, _ = engine.load_checkpoint(str(folder), tag=f"global_step{first}")
        assert path and engine.global_steps == first
    losses = [update(engine, step) for step in range(first, last)]
    engine.save_checkpoint(str(folder))
    if dist.get_rank() == 0:
        (folder / f"losses-{last}.json").write_text(json.dumps(losses))
        model.config.save_pretrained(folder)


def update(engine: deepspeed.DeepSpeedEngine, step: int) -> float:
    """The mean loss of all ranks, before the update."""
    tokens = torch.from_numpy(np.split(batch(step), dist.get_world_size())[dist.get_rank()])
    logits = engine(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
