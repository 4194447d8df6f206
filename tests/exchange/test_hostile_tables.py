"""500 mutants each of what a user names: an adapter that a model loads, and a table of names."""

import subprocess
import sys

import pytest

from tests.exchange.made import adapter
from tests.exchange.test_names import TABLE
from tests.ranks import ROOT

# Each is read in one process with bounded memory; ends with the number that is refused.
COMMON = """
import random, resource, shutil, sys
from pathlib import Path
import numpy as np
from shardrt.untrusted import printable
from tests.exchange.hostile import mutate, OUTSIDE, HUGE
from tests.exchange.made import CONFIG, Held, whole

scratch, refused, events = Path(sys.argv[1]), 0, []
names = {"exec", "import", "os.system", "subprocess.Popen", "os.fork"}

def attempt(seed, path, read):
    global refused
    try:
        read(path)
    except (ValueError, OSError) as error:
        text = printable(error)
        assert str(path) in text and len(text) < 8000, (seed, text)
        assert type(error) is not UnicodeDecodeError, seed
        refused += 1

def watch():
    sys.addaudithook(lambda event, args: events.append((event, args)) if event in names else None)
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
"""
ADAPTERS = """
from models import llama
from models.adapters import load_adapter
from shardrt.nn.lora import lora_parameters

def read(path):
    model = load_adapter(llama.Llama(CONFIG), path)
    for parameter in lora_parameters(model):
        assert parameter.size < 1 << 20

read(scratch / "valid")
try:
    read(scratch / "absent")
except OSError:
    pass
watch()
for seed in range(500):
    shutil.rmtree(scratch / "new", ignore_errors=True)
    shutil.copytree(scratch / "valid", scratch / "new")
    mutate(scratch / "new", seed)
    attempt(seed, scratch / "new", read)
"""
TABLES = """
from shardrt.exchange import names as tables
from shardrt.exchange.checkpoint import PARAMETER
from tests.damage import damaged_bytes

values = np.arange(24.0, dtype=np.float32).reshape(8, 3)
given = [f"net.{n}.{name}" for n in range(3) for name in ("query", "key", "down")]
given += ["other.a.b", "a" * 70_000]
tensors = {(PARAMETER, name): Held(values) for name in given}
whole_table = (scratch / "valid.toml").read_text()
WORDS = (
    *(*OUTSIDE, *map(str, HUGE), "*" * 40, "{}" * 20, "*a*", "(a+)+$", "[" * 900, "true", "nan", "1e999"),
    *("9" * 5000, "net.{}.query", "{from = 'net.{}.query', rows = [0, 9]}", "\\x1b", "x" * 9000),
)

def read(path):
    found = tables.from_table(tensors, path)
    assert len(found.tensors) < 100
    for tensor in found.tensors.values():
        whole(tensor)

def read_valid():
    read(scratch / "valid.toml")
read_valid()
watch()
for seed in range(500):
    random_, path = random.Random(seed), scratch / "new.toml"
    data = whole_table.encode()
    if seed % 2:
        data = damaged_bytes(data, random_)
    else:
        for _ in range(random_.randint(1, 3)):
            text = data.decode()
            parts = [part for part in text.replace("=", '"').split('"') if part.strip()]
            data = text.replace(random_.choice(parts), random_.choice(WORDS), 1).encode("utf-8", "replace")
    path.write_bytes(data)
    attempt(seed, path, read)
"""


@pytest.mark.parametrize("what", ["adapter", "table"])
def test_500_mutants_are_refused_in_a_line(what, tmp_path):
    if what == "adapter":
        adapter(tmp_path / "valid")
    else:
        (tmp_path / "valid.toml").write_text(TABLE)
    script = (
        COMMON + (ADAPTERS if what == "adapter" else TABLES) + "print(refused)\nassert not events, events[:2]"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 250 < int(done.stdout) < 500
