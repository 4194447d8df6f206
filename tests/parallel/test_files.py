"""Whole weights into models that are cut, and out again: files of Hugging Face, state dicts, one file."""

import threading
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file

import shardrt
from models.hub import load_pretrained, save_pretrained
from shardrt import checkpoint
from shardrt.checkpoint import full_state_dict, tensorfiles
from shardrt.fsdp import full_parameters
from shardrt.nn import add_lora, lora_parameters, merge_lora
from shardrt.untrusted import SourceFile
from tests import lab
from tests.parallel.meshes import MESHES, NETS, Mesh, spread
from tests.ranks import run_ranks

CUT = [name for name, mesh in MESHES.items() if mesh.tp > 1]


@pytest.fixture(scope="module", params=NETS)
def published(request, tmp_path_factory):
    """(kind, folder of its weights as Hugging Face keeps them, the weights)."""
    shardrt.manual_seed(5)
    model, folder = NETS[request.param](), tmp_path_factory.mktemp("published") / "model"
    generator = np.random.default_rng(5)
    weights = {n: generator.normal(size=p.shape).astype(np.float32) for n, p in model.named_parameters()}
    model.load_state_dict(weights)
    save_pretrained(model, folder)
    return request.param, folder, weights


def same(found, expected):
    return found.keys() == expected.keys() and all(np.array_equal(found[n], expected[n]) for n in expected)


def through(folder, out, on):
    """Load, look, and write again; (weights on rank 0, bytes read here, bytes held here)."""
    model = load_pretrained(folder)
    spread(model, on)
    READ.bytes = 0
    held = sum(parameter.shard.nbytes for parameter in model.parameters())
    read = READ.bytes
    weights = full_state_dict(model)
    save_pretrained(model, out)
    return weights, read, held


READ = threading.local()


@pytest.mark.parametrize("name", CUT)
def test_files_go_onto_parts_and_out_again_to_the_bit_and_a_rank_reads_what_it_holds(
    published, name, tmp_path, monkeypatch
):
    _, folder, expected = published
    plain = SourceFile.fill

    def counted(self, descriptor, data, offset):
        if isinstance(data, np.ndarray):  # not the header, which is read as bytes
            READ.bytes += data.nbytes
        plain(self, descriptor, data, offset)

    monkeypatch.setattr(SourceFile, "fill", counted)
    monkeypatch.setattr(tensorfiles, "BLOCK", 100)  # several pieces of each
    total = sum(values.nbytes for values in expected.values())
    results = run_ranks(MESHES[name].ranks, through, folder, tmp_path / "out", MESHES[name])
    assert same(results[0][0], expected)
    for _, read, held in results:
        assert held < 0.75 * total
        # Of a transposed matrix that is cut again whole columns are read, where a shard begins and ends.
        assert read == held if MESHES[name].shards == 1 else read < held + total / 4
    written, wanted = load_file(tmp_path / "out/model.safetensors"), load_file(folder / "model.safetensors")
    assert same(written, wanted)


def refused_on_all(on, folder):
    model = NETS["gpt"]()
    spread(model, on)
    message = []
    for write in (partial(save_pretrained, model, folder), partial(checkpoint.save, folder / "file", model)):
        with pytest.raises(checkpoint.CheckpointError) as error:
            write()
        message.append(str(error.value))
    return message


def test_all_ranks_learn_that_the_first_could_not_write(tmp_path):
    (tmp_path / "file").write_text("in the way")
    message = run_ranks(4, refused_on_all, MESHES["dp 2, tp 2"], tmp_path)
    assert all(each == message[0] for each in message)
    assert "exists already" in message[0][0] and "rank 0" in message[0][1]


def adapters(on, folder):
    """Adapters of a model that is cut come out whole, go in again, and are merged."""
    model = add_lora(NETS["llama"](), 2, targets=("blocks.*",))
    spread(model, on)
    generator = np.random.default_rng(8)
    given = {n: generator.normal(size=p.whole_shape).astype(np.float32) for n, p in model.named_parameters()}
    model.load_state_dict(given)
    own = {id(parameter) for parameter in lora_parameters(model)}
    whole = full_state_dict(model)
    save_pretrained(model, folder)
    assert all(p.requires_grad == (id(p) in own) for p in model.parameters())
    with full_parameters(model, writeback=True) if on.tp == 1 else nullcontext():
        merge_lora(model)
    merged = {n: values for n, values in full_state_dict(model).items() if "lora" not in n}
    return same(whole, given), merged


def test_adapters_go_in_and_out_and_are_merged_where_they_are_cut(tmp_path):
    (alone,) = run_ranks(1, adapters, Mesh(), tmp_path / "1")
    (whole, merged), *_ = run_ranks(4, adapters, Mesh(tp=4), tmp_path / "4")
    assert whole and same(merged, alone[1])
    assert same(*(load_file(tmp_path / size / "model.safetensors") for size in ("1", "4")))


@lab.on_ranks(2)
def test_an_adapter_of_a_head_that_is_cut_is_refused():
    with pytest.raises(ValueError, match="VocabParallel: 'head' has a LoRA adapter, which the loss would"):
        spread(add_lora(NETS["llama"](), 2), MESHES["tp 2"])
