"""Folders of Hugging Face's that others may have made: loaded, or refused in one line."""

import json
import os
import random
import struct

import pytest
from safetensors.numpy import save_file

from models import train
from models.hub import load_pretrained, save_pretrained
from shardrt.checkpoint import load
from shardrt.train.metrics import new_run_directory, resumed_run_directory
from shardrt.untrusted import printable
from tests.damage import ESCAPE, damaged_bytes, damaged_json
from tests.models.test_hub import made

KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "olmoe", "vit")


def settles(function, *arguments):
    """Whether it works; if not, it must be an error of which one line is made."""
    try:
        function(*arguments)
    except (ValueError, OSError) as error:
        assert type(error) in (ValueError, FileNotFoundError, OSError) or type(error).__name__ == "Refused"
        return False
    return True


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model of each kind."""
    made_in = tmp_path_factory.mktemp("untrusted")
    for kind in KINDS:
        save_pretrained(made(kind), made_in / kind, file_bytes=4000)
    return made_in


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_settings_and_indices_of_folders_are_refused_in_a_line(folders, tmp_path, kind):
    chosen, folder, results = random.Random(kind), tmp_path / kind, []
    folder.mkdir()
    names = [path.name for path in (folders / kind).iterdir()]
    for name in names:
        os.link(folders / kind / name, folder / name)
    for name in ("config.json", "model.safetensors.index.json"):
        content = (folder / name).read_bytes()
        for number in range(60):
            (folder / name).unlink()
            damage = (
                damaged_bytes(content, chosen)
                if number % 4 == 0
                else damaged_json(json.loads(content), chosen)
            )
            (folder / name).write_bytes(damage)
            results.append(settles(load_pretrained, folder))
        (folder / name).write_bytes(content)
    assert load_pretrained(folder) and 0 < sum(results) < len(results)


def test_damaged_headers_of_tensors_are_refused_in_a_line(folders, tmp_path):
    chosen, folder = random.Random(0), tmp_path / "gpt2"
    save_pretrained(made("gpt2"), folder)
    whole = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, rest = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    for number in range(100):
        text = damaged_json(header, chosen)
        data = struct.pack("<Q", len(text)) + text + rest
        (folder / "model.safetensors").write_bytes(damaged_bytes(whole, chosen) if number % 4 == 0 else data)
        settles(load_pretrained, folder)
        settles(load, folder, made("gpt2"))


@pytest.mark.parametrize("value", [10**19, 10**30, 1e19])
def test_numbers_of_settings_may_be_integers_of_any_size(folders, tmp_path, value):
    config = json.loads((folders / "llama" / "config.json").read_text())
    save_pretrained(made("llama"), tmp_path / "a")
    text = json.dumps(config | {"rope_theta": value, "rope_parameters": None})
    (tmp_path / "a" / "config.json").write_text(text)
    assert load_pretrained(tmp_path / "a").config.rope_theta == float(value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pipes_and_devices_in_a_folder_are_refused_at_once(tmp_path, name):
    from models.sampling import TokenisedText

    pytest.importorskip("tokenizers")
    folder = tmp_path / "gpt2"
    save_pretrained(made("gpt2"), folder)
    read = TokenisedText if name == "tokenizer.json" else load_pretrained
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        with pytest.raises(ValueError, match="regular file"):
            read(folder / name if name == "tokenizer.json" else folder)
    if name == "model.safetensors":
        with pytest.raises(ValueError, match="regular file"):
            load(folder, made("gpt2"))


def test_a_step_in_the_metadata_that_is_none_is_no_error(tmp_path):
    model = made("gpt2")
    for step, message in (("7", 7), ("x", 0), ("9" * 5000, 0), ("-1", 0)):
        save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"step": step})
        assert load(tmp_path, model) == message


def test_a_name_that_a_terminal_obeys_or_no_file_can_hold_is_no_name_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in (ESCAPE, "a\udcff", "a\nb", "a\x1b[2J", "a\u202eb"):
        for make in (new_run_directory, resumed_run_directory):
            with pytest.raises(ValueError, match="name"):
                make(name)
    with pytest.raises(SystemExit) as ended:
        train.main(["--name", "a\udcff"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "a\\udcff" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("seed", range(3))
def test_damaged_configs_are_refused_in_a_line(tmp_path, monkeypatch, capsys, seed):
    monkeypatch.chdir(tmp_path)
    chosen, path = random.Random(seed), tmp_path / "c.toml"
    whole = train.DEFAULT.read_bytes()
    lines = whole.split(b"\n")
    values = (
        b"1e400",
        b"inf",
        b"nan",
        b"9" * 5000,
        b"[" * 2000 + b"]" * 2000,
        b'"\\u001b[2J"',
        b"true",
        b"{}",
    )
    for number in range(40):
        damaged = list(lines)
        place = chosen.choice([at for at, line in enumerate(lines) if b"=" in line])
        damaged[place] = lines[place].split(b"=")[0] + b"= " + chosen.choice(values)
        path.write_bytes(damaged_bytes(whole, chosen) if number % 3 == 0 else b"\n".join(damaged))
        try:
            train.parse(["--config", str(path)])
        except (ValueError, OSError) as error:
            assert len(str(error)) < 20_000
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit) as ended:
        train.main(["--config", str(tmp_path / "pipe")])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error == f"error: {tmp_path}/pipe is not a regular file\n"
    assert printable(error.strip()) == error.strip()
