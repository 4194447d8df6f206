"""Small models with the shapes of trouble."""

from shardrt import functional as F
from shardrt import nn


class Block(nn.Module):
    """Linear, GELU, linear, with odd widths so that nothing divides evenly."""

    def __init__(self, width=7, hidden=13):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Outer(Block):
    """A unit with parameters of its own around another unit."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return super().forward(self.inner(x))


class Net(nn.Module):
    """Embedding, blocks, norm, and a head tied to the embedding: parameters of the outermost unit."""

    def __init__(self, blocks=3, width=7, vocab=11):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def run_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens):
        x = self.run_blocks(self.embed(tokens))
        return F.linear(self.norm(x), self.embed.weight)


class CalledTwice(Net):
    """Its second block is called at two places."""

    def run_blocks(self, x):
        first, second, third = self.blocks
        return third(second(first(second(x))))


class Skips(Net):
    """Leaves out the blocks whose numbers are in `skipped`."""

    skipped = ()

    def run_blocks(self, x):
        for number, block in enumerate(self.blocks):
            x = x if number in self.skipped else block(x)
        return x


class NeverCalled(Skips):
    """Its second block is not called at all."""

    skipped = (1,)


class PartlyUsed(Net):
    """One block is called, but half of its parameters are not used."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks[1].spare = nn.Linear(7, 5)


class TiedInside(Net):
    """Within each block, both linear layers have one weight."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for block in self.blocks:
            block.up = nn.Linear(7, 7)
            block.down = nn.Linear(7, 7)
            block.down.weight = block.up.weight


class Nested(nn.Module):
    """Units inside units: stages of blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.stages = nn.ModuleList(nn.Sequential(Block(), nn.Linear(7, 7), Block()) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for stage in self.stages:
            x = stage(x)
        return F.linear(x, self.embed.weight)


class Frozen(Net):
    """The second block is not trained, and neither is a bias of the first."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad = False
        self.blocks[0].up.bias.requires_grad = False


class ViewedBlock(Block):
    """Uses its parameters through views and arithmetic, not as handles of a layer."""

    def forward(self, x):
        hidden = F.gelu(F.linear(x, self.down.weight.T, self.up.bias))
        square = F.matmul(self.down.weight, self.up.weight)
        return x * self.up.weight[0] + (hidden @ self.up.weight + self.down.bias) @ square


class Viewed(Net):
    """Ops that take arrays may save them: they must not be slots that others get next."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = nn.ModuleList(ViewedBlock() for _ in range(6))
