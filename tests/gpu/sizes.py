"""How much the tests here compute: on a GPU as training, on the GPU emulator what shows the same."""

import sys

from models.gpt import GPTConfig

SOFTWARE = "tests.softgpu.plugin" in sys.modules

if SOFTWARE:
    MODEL = GPTConfig(n_layer=2, n_head=4, n_embd=16, block_size=8, vocab_size=97)
    STEPS, LEARNT = 8, 0.999  # the last loss is below this part of the first one
    ROWS, WIDTH = 40, 48  # of products
    HEADS = [(2, 3, 40, 64), (1, 2, 33, 128)]  # batch, heads, time, width
    TIME = 40  # of other attention
    ELEMENTS = ["float32", "bfloat16"]
    CONVOLUTIONS = ["groups of 16", "dilated, odd"]
else:
    MODEL = GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=32, vocab_size=97)
    STEPS, LEARNT = 50, 0.8
    ROWS, WIDTH = 320, 768
    HEADS = [(2, 3, 64, 64), (1, 2, 200, 64), (2, 2, 128, 128), (1, 12, 1024, 64)]
    TIME = 128
    ELEMENTS = ["float32", "bfloat16", "float16"]
    CONVOLUTIONS = None  # all
