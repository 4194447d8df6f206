"""Draws a simulated step on 64 ranks above one on 4,096: the picture of docs/howto/simulate.md.

    python docs/figures/scale.py docs/figures/scale.svg

Six blocks of GPT-2, each a unit, and the whole; 8 x 1,024 tokens for each rank, on h100-8.
"""

import sys
from pathlib import Path

import numpy as np

from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.models.gpt import GPT, GPTConfig
from shardrt.simulate.clock import price
from shardrt.simulate.machine import Machine
from shardrt.simulate.phases import traced
from shardrt.simulate.script import record_of, spans_kept
from shardrt.tools.trace import Event, rows_of
from shardrt.train import charts
from shardrt.train.trace import events_of

RANKS = (64, 4096)


def train() -> None:
    """Two steps."""
    mesh = init_device_mesh("auto")
    model = GPT(GPTConfig(n_layer=6, n_head=12, n_embd=768, block_size=1024, vocab_size=50304))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    tokens = np.zeros((8, 1024), np.int64)
    for _ in range(2):
        F.cross_entropy(model(tokens), tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def simulated(ranks: int) -> list[Event]:
    """The last step, of units and collectives: kernels are too many."""
    with spans_kept() as spans_of:
        programs = record_of(train, ranks, steps=2)
    timing, spans = price(programs, Machine.load("h100-8")), spans_of(programs[0])
    units = {span.label for span in spans}
    events = events_of(traced(timing, spans), 0, timing.window(0)[0])
    return [event for event in events if _drawn(event["name"], units)]


def _drawn(name: str, units: set[str]) -> bool:
    forward_or_backward = name.partition(" ")[0] in ("forward", "backward")
    return not forward_or_backward or name in units


def draw() -> str:
    """As SVG: both on one axis of time."""
    rows, legend = {}, {}
    for ranks in RANKS:
        own, legend_of = rows_of(simulated(ranks), 0, 1)
        legend |= legend_of
        own = {stream.removesuffix(" stream"): bars for stream, bars in own.items()}
        rows |= {f"{stream}, {ranks:,}": own[stream] for stream in ("gather", "compute", "reduce")}
    title = f"a step on {RANKS[0]:,} ranks and on {RANKS[1]:,}, simulated"
    return charts.schedule(title, rows, legend, axis="milliseconds from the beginning of the step")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/figures/scale.py FILE.svg")
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")
