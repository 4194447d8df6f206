"""Models beside transformers: logits, losses, gradients and tokens, and weights both ways."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from models import hub, train
from models.gpt import Block as GPTBlock
from models.hub import load_pretrained, save_pretrained
from models.llama import Block as LlamaBlock
from models.plans import plan_of
from models.sampling import continued, greedy
from models.vit import Block as ViTBlock
from shardrt import functional as F
from shardrt import nn
from shardrt.comm import init_device_mesh, thread, world
from shardrt.fsdp import by_class, fully_shard, set_gradient_divide_factor, wrap
from shardrt.parallel import (
    Pipeline,
    context_plan,
    expert_plan,
    parallelize_module,
    shard_sequence,
)
from tests import lab
from tests.parallel.meshes import whole_gradients

pytestmark = pytest.mark.torch("transformers")

TOKENS = np.random.default_rng(0).integers(0, 61, (4, 20))
IMAGES = np.random.default_rng(1).normal(size=(4, 3, 24, 24)).astype(np.float32)
LABELS = np.array([3, 0, 4, 3])


def made(kind):
    """A small model of transformers with random weights, wide enough that all of it matters."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        ViTConfig,
        ViTForImageClassification,
    )

    torch.manual_seed(0)
    if kind == "gpt2":
        shape = {"vocab_size": 61, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**shape, **ends, initializer_range=0.2)).eval()
    if kind == "vit":
        shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 5}
        shape |= {"intermediate_size": 80, "image_size": 24, "patch_size": 8}
        return ViTForImageClassification(ViTConfig(**shape, initializer_range=0.2)).eval()
    if kind in EXPERTS:
        return mixture(kind).eval()
    if kind in KIN:
        return kin(kind).eval()
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if kind == "llama-scaled":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=kind == "llama-tied",
        rope_parameters=rope,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def kin(kind):
    """One with a single MLP in a block; norms and biases are random, too, or no test would see them."""
    import torch
    from transformers import (
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    shape = {
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    shape |= dict.fromkeys(("bos_token_id", "eos_token_id"))
    some = ["full_attention", "sliding_attention", "full_attention"]
    model = {
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)),
        "qwen2-windows": lambda: Qwen2ForCausalLM(
            Qwen2Config(**shape, use_sliding_window=True, sliding_window=6, max_window_layers=1)
        ),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True)),
        "qwen3-windows": lambda: Qwen3ForCausalLM(
            Qwen3Config(**shape, head_dim=16, use_sliding_window=True, sliding_window=5, layer_types=some)
        ),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**shape, sliding_window=7)),
        "mistral-whole": lambda: MistralForCausalLM(MistralConfig(**shape, head_dim=16, sliding_window=None)),
    }[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model


def mixture(kind):
    """One with experts; a head is not as wide as n_embd / n_head, where that may be."""
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        OlmoeConfig,
        OlmoeForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    shape = {
        "vocab_size": 61,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "router_aux_loss_coef": 0.05,
    }
    shape |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if kind == "mixtral":
        own = {"intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
        return MixtralForCausalLM(MixtralConfig(**shape, **own))
    if kind == "qwen3-moe":
        own = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **own, norm_topk_prob=True))
    own = {"intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 3, "clip_qkv": 1.2}
    return OlmoeForCausalLM(OlmoeConfig(**shape, **own))


EXPERTS = ["mixtral", "qwen3-moe", "olmoe"]
KIN = ["qwen2", "qwen2-windows", "qwen3", "qwen3-windows", "mistral", "mistral-whole"]
EVERY_FORM = ["qwen2-windows", "qwen3-windows", "mistral"]  # biases, norms of heads, windows
LANGUAGE = ["gpt2", "llama-tied", "llama-scaled", *KIN, *EXPERTS]
KINDS = [*LANGUAGE, "vit"]


def asked(kind):
    """What a model sees, and what it should say."""
    return (IMAGES, LABELS) if kind == "vit" else (TOKENS, TOKENS)


class Reference:
    """Its weights in a folder; logits, the mean loss and gradients; what a language model goes on with."""

    def __init__(self, kind, folder):
        import torch

        model = made(kind)
        model.save_pretrained(folder)
        inputs, targets = map(torch.from_numpy, asked(kind))
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        self.kind, self.folder = kind, folder
        self.logits, self.loss = logits.detach().numpy(), loss.item()
        self.greedy = self._greedy(model, inputs[:2, :5]) if kind in LANGUAGE else None
        for parameter in model.parameters():
            parameter.data = parameter.grad
        model.save_pretrained(folder / "gradients")  # by the names of files, which may not be the modules'
        self.gradients = load_file(folder / "gradients" / "model.safetensors")

    @staticmethod
    def _greedy(model, tokens):
        import torch

        how = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        seen = torch.ones_like(tokens)  # or it takes tokens that are 0 for padding
        return model.generate(tokens, attention_mask=seen, **how).numpy()


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    made = {}

    def of(kind):
        return made.get(kind) or made.setdefault(kind, Reference(kind, tmp_path_factory.mktemp(kind)))

    return of


def blocks_are_units(model, **how):
    return wrap(model, by_class(GPTBlock, LlamaBlock, ViTBlock), **how)


def sharded(folder, ep=1):
    """(model, mesh of all ranks): blocks are units, experts are spread over `ep` of the ranks."""
    if ep == 1:
        mesh = init_device_mesh("auto")
        return blocks_are_units(load_pretrained(folder), mesh=mesh), mesh
    mesh = init_device_mesh("auto", (world.current().size,), ("dp_shard",))
    fold, model = mesh.fold("ep", ep, over=("dp_shard",)), load_pretrained(folder)
    parallelize_module(model, fold["ep"], expert_plan(model))
    for block in model.blocks:
        fully_shard(block.mlp.experts, mesh=fold["efsdp"])
    return blocks_are_units(model, mesh=mesh), mesh


def step(folder, kind, ep=1):
    """This rank's logits and loss, and the gradients under transformers' names."""
    model, mesh = sharded(folder, ep)
    inputs, targets = (np.split(whole, mesh.size)[mesh.rank] for whole in asked(kind))
    logits = model(inputs)
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    form, _ = hub.described(model)
    places, gradients = dict(form.tensors(model.config)), {}
    for name, values in lab.whole_gradients(model).items():
        for part, tensor in hub.in_files(values, places[name]) if mesh.rank == 0 else ():
            gradients[form.full_name(part.name)] = np.array(tensor)
    return np.array(logits.data), loss.item(), gradients


SPREAD = [(ranks, kind, ep) for kind in EXPERTS for ranks, ep in ((2, 2), (4, 2), (4, 4))]


@pytest.mark.parametrize(
    "ranks, kind, ep",
    [
        *((ranks, kind, 1) for kind in KINDS for ranks in ((1, 2, 4) if kind in EVERY_FORM else (1, 4))),
        *SPREAD,
    ],
)
def test_logits_loss_and_gradients_are_those_of_transformers(references, kind, ranks, ep):
    reference = references(kind)
    found = thread.run(ranks, step, reference.folder, kind, ep)
    logits = np.concatenate([logits for logits, _, _ in found])
    assert np.abs(logits - reference.logits).max() <= 1e-4 * np.abs(reference.logits).max()
    assert np.mean([loss for _, loss, _ in found]) == pytest.approx(reference.loss, rel=1e-5)
    assert_gradients(found[0][2], reference)


def assert_gradients(gradients, reference):
    assert gradients.keys() == reference.gradients.keys()
    for name, expected in reference.gradients.items():
        difference = np.linalg.norm(gradients[name] - expected)
        # A bias of all keys changes no softmax: its gradient is zero but for rounding.
        of_queries = name.replace("key.bias", "query.bias").replace("k_proj.bias", "q_proj.bias")
        scale = reference.gradients[of_queries]
        assert difference <= 1e-4 * np.linalg.norm(scale), name


def went_on(folder, ep):
    model = sharded(folder, ep)[0].eval()
    return continued(model, TOKENS[:2, :5], 64, greedy, block_size=128)


@pytest.mark.parametrize(
    "ranks, kind, ep",
    [
        *((ranks, kind, 1) for kind in LANGUAGE for ranks in ((1, 2, 4) if kind in EVERY_FORM else (1, 2))),
        *((2, kind, 2) for kind in EXPERTS),
    ],
)
def test_greedy_it_goes_on_as_transformers_does_token_for_token(references, kind, ranks, ep):
    reference = references(kind)
    for found in thread.run(ranks, went_on, reference.folder, ep):
        np.testing.assert_array_equal(found, reference.greedy[:, 5:])
    assert len(np.unique(reference.greedy)) > 10  # not one token over and over


def cut(folder, axis, size):
    """(what runs it, its model, the mesh of the data, of all) with `axis` beside the data, on 4 ranks."""
    mesh = init_device_mesh("cpu", (size, 4 // size), (axis, "dp_shard"))
    model, data = load_pretrained(folder), mesh["dp_shard"]
    net, stages = model, [model]
    if axis == "tp":
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=True))
    elif axis == "cp":
        parallelize_module(model, mesh["cp"], context_plan(model))
        data = mesh.flat("dp_shard", "cp")
    else:
        net = Pipeline(model, mesh["pp"], schedule="1F1B", micro_batches=2)
        stages = net.stages
    for module in (module for stage in stages for module in (*stage.blocks, stage)):
        fully_shard(module, mesh=data)
    for stage in stages:
        set_gradient_divide_factor(stage, 1.0)
    return net, model, mesh


def along(folder, axis, size):
    """This rank's losses, the gradients under transformers' names, and the tokens that it goes on with."""
    net, model, mesh = cut(folder, axis, size)
    (rows,) = lab.rows(mesh["dp_shard"], TOKENS)
    losses = []

    def loss_of(output, batch):
        losses.append(output.item() / TOKENS.size)
        return output * (1 / TOKENS.size)

    if axis == "pp":
        net.step(loss_of, [{"tokens": r, "targets": r, "reduction": "sum"} for r in np.split(rows, 2)])
    else:
        batch = {"tokens": rows, "targets": rows}
        if axis == "cp":
            part = shard_sequence(rows, rows, mesh=mesh["cp"])
            batch = {"tokens": part.tokens, "targets": part.targets, "positions": part.positions}
        loss_of(model(**batch, reduction="sum"), batch).backward()
    form, _ = hub.described(model)
    places, gradients = dict(form.tensors(model.config)), {}
    for name, values in whole_gradients(model).items():
        for part, tensor in hub.in_files(values, places[name]):
            gradients[form.full_name(part.name)] = np.array(tensor)
    model.eval()
    return sum(losses), gradients, continued(net, TOKENS[:2, :5], 16, greedy, block_size=128)


@pytest.mark.parametrize("axis, size", [("tp", 2), ("tp", 4), ("pp", 2), ("cp", 2)])
@pytest.mark.parametrize("kind", KIN[:-1])
def test_along_other_axes_loss_gradients_and_tokens_are_those_of_transformers(references, kind, axis, size):
    """With 4 ranks of tp two compute a head of keys and values together."""
    reference = references(kind)
    found = thread.run(4, along, reference.folder, axis, size)
    loss = sum(loss for loss, _, _ in found) / (size if axis == "tp" else 1)
    assert loss == pytest.approx(reference.loss, rel=1e-5)
    assert_gradients(found[0][1], reference)
    for _, _, tokens in found:
        np.testing.assert_array_equal(tokens, reference.greedy[:, 5:21])


def exported(source, target, ep=1):
    save_pretrained(sharded(source, ep)[0], target, file_bytes=40_000)


@pytest.mark.parametrize("ranks, kind, ep", SPREAD)
def test_files_of_spread_experts_are_those_they_came_from_to_the_bit(references, tmp_path, ranks, kind, ep):
    thread.run(ranks, exported, references(kind).folder, tmp_path, ep)
    before = tensors_in(references(kind).folder)
    assert any(".experts." in name for name in before)
    lab.assert_equal(tensors_in(tmp_path), before)


def tensors_in(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_what_was_exported_and_gives_the_same_logits(references, kind, tmp_path):
    import torch

    reference, expected = references(kind), type(made(kind))
    thread.run(2, exported, reference.folder, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    lab.assert_equal(tensors_in(tmp_path / "out"), tensors_in(reference.folder))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [expected.__name__]
    model, message = expected.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(message.values()), message
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(asked(kind)[0])).logits.numpy()
    np.testing.assert_allclose(logits, reference.logits, rtol=1e-6, atol=1e-6)


ENDS = {"bos_token_id": 5, "eos_token_id": [7, 9], "pad_token_id": 8}


def furnished(kind, folder):
    """A source as people publish them: ids, a tokenizer with settings, generation, a setting of theirs."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, ViTImageProcessor

    model = made(kind)
    model.config.update({"their_own": {"kept": [1, None]}})
    if kind == "vit":
        model.config.id2label = dict(enumerate("abcde"))
        model.config.label2id = {name: i for i, name in model.config.id2label.items()}
        how = {"size": {"height": 24, "width": 24}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4] * 3}
        ViTImageProcessor(**how, resample=2).save_pretrained(folder)
    else:
        model.config.update(ENDS)
        model.generation_config = GenerationConfig(**ENDS, temperature=0.7, do_sample=True)
        words = {"[UNK]": 0, "<s>": 5, "<end>": 7, "<pad>": 8, **{f"w{i}": i for i in range(10, 61)}}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        named = {"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<pad>", "unk_token": "[UNK]"}
        how = {"chat_template": "{{ messages[0].content }}", "padding_side": "left"}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **how).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def lightly_tuned(source, target, lora):
    model = load_pretrained(source)
    if lora:
        nn.add_lora(model, 2)
    blocks_are_units(model)
    save_pretrained(model, target)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [False, True])
def test_what_a_source_says_of_its_tokens_images_and_generation_is_exported_with_it(tmp_path, kind, lora):
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, GenerationConfig

    source, target = furnished(kind, tmp_path / "source"), tmp_path / "out"
    thread.run(2, lightly_tuned, source, target, lora)
    before, after = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, target))
    ours = {"_name_or_path", "dtype", "transformers_version", "rope_scaling", "rope_theta"}
    dropouts = {name for name in before if "drop" in name or "pdrop" in name}
    for name in before.keys() - ours - dropouts:
        assert after[name] == before[name], name
    assert after["their_own"] == {"kept": [1, None]}
    if kind == "vit":
        assert AutoImageProcessor.from_pretrained(target).image_mean == (0.1, 0.2, 0.3)
        return
    generation = GenerationConfig.from_pretrained(target)
    assert {name: getattr(generation, name) for name in ENDS} == ENDS and generation.temperature == 0.7
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.padding_side) == ("<end>", 7, "left")
    assert tokenizer.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize("kind", LANGUAGE)
def test_a_model_that_no_one_gave_an_end_has_none_in_transformers_too(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    made(kind).save_pretrained(tmp_path / "source")
    model = load_pretrained(tmp_path / "source")
    del model.origin  # as one that was trained here from its initial values
    save_pretrained(model, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (found.config.eos_token_id, found.generation_config.eos_token_id) == (None, None)
    assert hub.ends_in(tmp_path / "out") == []


def test_both_end_a_text_at_the_same_tokens(references, tmp_path):
    """generation_config.json goes over config.json."""
    import torch
    from transformers import AutoModelForCausalLM

    model = made("llama-tied")
    plain = references("llama-tied").greedy[:, 5:]
    ends = [int(plain[0, 20]), int(plain[1, 9])]
    for own, generation in (({"eos_token_id": ends}, None), ({"eos_token_id": 3}, {"eos_token_id": ends})):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        config = json.loads((folder / "config.json").read_text()) | own
        (folder / "config.json").write_text(json.dumps(config))
        if generation:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        theirs, start = AutoModelForCausalLM.from_pretrained(folder), torch.from_numpy(TOKENS[:2, :5])
        how = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
        expected = theirs.generate(start, attention_mask=torch.ones_like(start), **how).numpy()[:, 5:]
        found = continued(
            load_pretrained(folder).eval(),
            *(TOKENS[:2, :5], 64, greedy),
            block_size=128,
            ends=hub.ends_in(folder),
        )
        assert found.shape == expected.shape and found.shape[1] < 64
        for ours, other in zip(found, expected, strict=True):
            length = 1 + int(np.flatnonzero(np.isin(ours, ends))[0])
            np.testing.assert_array_equal(ours[:length], other[:length])
            assert (other[length:] == 0).all(), "transformers fills up with its padding, we with the end"


@pytest.mark.parametrize("crop", ["pad", "resize"])
def test_images_are_seen_there_as_in_training(tmp_path, crop):
    from PIL import Image
    from transformers import AutoImageProcessor

    smooth = np.add.outer(np.arange(64), 2 * np.arange(96))[..., None] % 256 * np.array([1, 0.5, 0.25])
    pixels = smooth.astype(np.uint8)
    for kind in ("left", "right"):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for number in range(5):
            Image.fromarray(pixels).save(tmp_path / "pictures" / kind / f"{number}.png")
    options = f"--images.size 28 --images.channels 3 --images.crop {crop} --images.mean 0.1 0.2 0.3"
    options += " --images.std 0.5 --architecture vit --model.image-size 28 --model.patch-size 7"
    task = train.parse([*options.split(), "--data", str(tmp_path / "pictures")]).task()
    (tmp_path / "preprocessor_config.json").write_bytes(task.preprocessor())
    found = AutoImageProcessor.from_pretrained(tmp_path)(Image.fromarray(pixels))["pixel_values"][0]
    expected = next(iter(task.held_out(1, 1, 0, 1)))[0][0]
    assert found.shape == expected.shape == (3, 28, 28)
    assert np.abs(np.asarray(found) - expected).mean() < 0.05 * expected.std()


@pytest.mark.parametrize("kind", EXPERTS)
def test_the_loss_with_balance_pooled_over_layers_is_that_of_transformers(tmp_path, kind):
    import torch

    theirs = made(kind).train()
    theirs.save_pretrained(tmp_path / "model")
    inputs = torch.from_numpy(TOKENS)
    found = theirs(inputs, output_router_logits=True)
    expected = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), inputs.flatten())
    expected = expected + 0.05 * found.aux_loss
    expected.backward()
    model = load_pretrained(tmp_path / "model", balance_loss=0.05, pooled_balance=True)
    loss = model(TOKENS, TOKENS)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, layer in zip(model.blocks, theirs.model.layers, strict=True):
        gradient = layer.mlp.gate.weight.grad.numpy()
        difference = np.linalg.norm(np.asarray(ours.mlp.router.weight.grad) - gradient)
        assert difference <= 1e-4 * np.linalg.norm(gradient)
