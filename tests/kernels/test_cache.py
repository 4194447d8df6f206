"""A second start compiles nothing, and loads no compiler: every kernel that training needs is found on disk.

Of a node's ranks one compiles them, before the first step; so what it has called is what a step needs.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba.core.codegen import JITCPUCodegen
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

from shardrt.kernels import cpu, onednn
from shardrt.kernels.cpu import _jit, _warm_up
from tests.kernels import test_attention_blocks
from tests.ranks import BACKSTOP

ROOT = Path(__file__).parent.parent.parent

COUNT = """
import sys
from numba.core.dispatcher import Dispatcher
from shardrt.kernels.cpu._warm_up import call_all
call_all()
found = {
    id(kernel): kernel
    for name, module in list(sys.modules.items()) if name.startswith("shardrt.kernels.cpu")
    for kernel in vars(module).values() if isinstance(kernel, Dispatcher)
}
hits = sum(sum(kernel.stats.cache_hits.values()) for kernel in found.values())
misses = sum(sum(kernel.stats.cache_misses.values()) for kernel in found.values())
print(hits, misses, int("numba.np.linalg" in sys.modules))
"""


TRAIN = """
import sys
import numpy as np
from numba.core.dispatcher import Dispatcher
import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from shardrt.kernels.cpu._warm_up import call_all

def compiled():
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("shardrt.kernels.cpu")]
    kernels = [k for m in modules for k in vars(m).values() if isinstance(k, Dispatcher)]
    return {(f"{k.__module__}.{k.__name__}", str(s)) for k in kernels for s in k.signatures}

def train(model, policy):
    mesh = init_device_mesh("auto")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = optim.AdamW(model.parameters())
    for _ in range(2):
        tokens = np.arange(32).reshape(2, 16)
        model(tokens, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

call_all()
before = compiled()
sizes = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=64)
low = MixedPrecisionPolicy("bfloat16", "float32", "float32", full_precision=(nn.LayerNorm, nn.RMSNorm))
for policy in (None, low):
    train(GPT(GPTConfig(**sizes)), policy)
    train(Llama(LlamaConfig(n_kv_head=1, n_hidden=48, **sizes)), policy)
print(len(before), *sorted(compiled() - before), sep="\\n")
"""


def start():
    """(kernels loaded from the cache, kernels compiled, whether Numba's compiler was loaded) by a process."""
    return tuple(map(int, output_of("import shardrt\n" + COUNT).split()))


def output_of(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=BACKSTOP
    ).stdout


def test_a_second_start_compiles_nothing_and_loads_no_compiler():
    start()
    hits, misses, compiler = start()
    assert misses == compiler == 0
    assert hits > 20


def test_what_the_first_rank_has_warmed_up_is_all_that_steps_in_float32_and_bfloat16_need():
    count, *more = output_of(TRAIN).splitlines()
    assert int(count) > 20 and not more


BITS = """
import sys
from hashlib import sha256
from tests.kernels.test_attention_blocks import PAIRS, _vectors, heads, run
for low in [False] * _vectors.FMA + [True] * PAIRS:
    q, k, v = (heads(low, 1, 256, count, 64, seed=count) for count in (12, 4, 4))
    dy = heads(False, 1, 256, 12, 64, seed=1)
    found = run(dy, q, k, v, causal=True, scale=64**-0.5)
    print(low, sha256(b"".join(x.tobytes() for x in found)).hexdigest())
"""


@pytest.mark.skipif(not test_attention_blocks._vectors.FMA, reason="needs AVX2")
def test_a_process_that_compiles_has_the_bits_of_one_that_loads(monkeypatch, tmp_path):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    compiled = output_of(BITS)
    assert list(tmp_path.rglob("*_attention*.nbc"))
    assert output_of(BITS) == compiled != ""


def test_what_kernels_call_becomes_a_piece_of_them_where_its_bits_depend_on_how_it_is_compiled():
    modules = [module for name, module in sys.modules.items() if name.startswith("shardrt.kernels.cpu")]
    kernels = [
        kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, Dispatcher)
    ]
    names = [(kernel.py_func.__globals__, kernel.py_func.__code__.co_names) for kernel in kernels]
    called = [
        found[name] for found, used in names for name in used if isinstance(found.get(name), Dispatcher)
    ]
    inexact = [kernel for kernel in called if kernel.targetoptions["fastmath"]]
    assert len(inexact) > 10
    assert not [kernel for kernel in inexact if not kernel.targetoptions["forceinline"]]


def test_a_kernel_is_compiled_again_where_one_that_it_uses_has_changed(monkeypatch, tmp_path):
    kernel, codegen = cpu.dropout._apply, cpu_target.target_context.codegen()
    signature, changed = (), tmp_path / "philox.py"
    shutil.copy2(cpu.philox.__file__, changed)
    monkeypatch.setattr(cpu.philox, "__file__", str(changed))
    keys = []
    for stamp in (1, 1, 2):
        os.utime(changed, ns=(stamp, stamp))
        _jit._used.cache_clear()
        keys.append([k._cache._index_key(signature, codegen) for k in (kernel, cpu.softmax._forward)])
    _jit._used.cache_clear()
    assert keys[0] == keys[1]
    assert keys[1][0] != keys[2][0] and keys[1][1] == keys[2][1]


CHANGES = {
    "a source": lambda patch, folder: (folder / "_jit.py").write_text("changed"),
    "a new source": lambda patch, folder: (folder / "new.py").touch(),
    "Numba": lambda patch, folder: patch.setattr(numba, "__version__", "another"),
    "Python": lambda patch, folder: patch.setattr(sys.implementation, "cache_tag", "another"),
    "the processor": lambda patch, folder: patch.setattr(JITCPUCodegen, "_get_host_cpu_name", str),
    "its bfloat16": lambda patch, folder: patch.setattr(onednn, "computes_bf16", lambda: "otherwise"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_compiled_is_not_called_again_until_this_changes(change, monkeypatch, tmp_path):
    called, mark = [], _warm_up._mark
    for source in Path(_warm_up.__file__).parent.glob("*.py"):
        shutil.copy2(source, tmp_path)
    monkeypatch.setattr(_warm_up, "__file__", str(tmp_path / "_warm_up.py"))
    monkeypatch.setattr(_warm_up, "_mark", lambda: tmp_path / mark().name)
    monkeypatch.setattr(_warm_up, "call_all", lambda: called.append(mark()))
    for _ in range(3):
        cpu.warm_up()
    assert called == [mark()]
    CHANGES[change](monkeypatch, tmp_path)
    for _ in range(2):
        cpu.warm_up()
    assert called[1:] == [mark()]
