"""Names that a user of PyTorch looks for in torch, among functions or on a tensor, and finds elsewhere.

docs/reference/functions.md has all of them side by side; shardrt/nn/elsewhere.py has those of modules and
optimizers.
"""

import sys

_NUMPY = "use NumPy's, whose arrays every op takes"
_BESIDE = "compare with ==, <, ... : that gives an array of booleans"
_DEVICE = "tensors are made on the device that init_device_mesh names"
_TYPE = "use F.cast(x, dtype)"
_IN_PLACE = "there are no functions that write in place, but x += y and its kin, which make another tensor"

FUNCTION = {
    "cat": "use F.concatenate(tensors, axis)",
    "concat": "use F.concatenate(tensors, axis)",
    "bmm": "use F.matmul, which takes batches",
    "mm": "use F.matmul",
    "clip": "use F.clamp",
    "prod": "use x.cumsum of logarithms, or NumPy's where no gradient is needed",
    "binary_cross_entropy_loss": "use F.binary_cross_entropy",
    "adaptive_avg_pool1d": "use F.mean over the last axis, or F.avg_pool2d",
    "true_divide": "use F.div",
    "swapaxes": "use F.transpose",
    "take_along_dim": "use F.gather",
    "masked_select": "use x[mask]",
    "multi_head_attention_forward": "use F.self_attention or F.scaled_dot_product_attention",
}
FUNCTION |= dict.fromkeys(
    "arange zeros ones full empty linspace eye tensor as_tensor from_numpy zeros_like ones_like full_like "
    "rand randn randint randperm meshgrid nonzero unique isnan isfinite isinf any all equal allclose "
    "bincount searchsorted bucketize histc outer nan_to_num".split(),
    _NUMPY,
)
FUNCTION |= dict.fromkeys("eq ne lt le gt ge greater less".split(), _BESIDE)

TENSOR = {
    "to": f"{_DEVICE}; for types, {_TYPE}",
    "type": _TYPE,
    "type_as": _TYPE,
    "cuda": _DEVICE,
    "cpu": f"{_DEVICE}; x.numpy() gives an array of the host",
    "device": _DEVICE,
    "contiguous": "leave it out: ops see to it themselves",
    "clone": "leave it out: no op writes to its inputs; x.data.copy() is an array of its own",
    "dim": "use x.ndim",
    "numel": "use x.size",
    "t": "use x.T",
    "tolist": "use x.numpy().tolist()",
    "requires_grad_": "use Tensor(array, requires_grad=True)",
    "clip": "use x.clamp",
    "repeat": "use x.tile(counts)",
    "bmm": "use x @ y",
    "mm": "use x @ y",
    "grad_fn": "use x.node",
    "view_as": "use x.reshape(y.shape)",
    "expand_as": "use x.expand(y.shape)",
    "reshape_as": "use x.reshape(y.shape)",
    "amax": "use x.max(axis)",
    "amin": "use x.min(axis)",
    "prod": FUNCTION["prod"],
    "cumprod": FUNCTION["prod"],
    "masked_select": "use x[mask]",
    "any": "compare with ==, <, ... : that gives an array, which has any()",
    "all": "compare with ==, <, ... : that gives an array, which has all()",
}
TENSOR |= dict.fromkeys("float double half bfloat16".split(), _TYPE)
TENSOR |= dict.fromkeys("long int bool".split(), "use x.data.astype(dtype): these types have no gradient")
TENSOR |= dict.fromkeys("eq ne lt le gt ge".split(), _BESIDE)
TENSOR |= dict.fromkeys(
    "add_ sub_ mul_ div_ copy_ zero_ fill_ clamp_ masked_fill_ scatter_ index_add_ detach_ normal_".split(),
    _IN_PLACE,
)

# In torch itself; shardrt/__init__.py adds what shardrt.functional has.
TORCH = FUNCTION | {
    "save": "use shardrt.checkpoint.save or CheckpointManager, or numpy.savez of full_state_dict(model)",
    "load": "use shardrt.checkpoint.load(path, model), or model.load_state_dict(arrays)",
    "distributed": "use shardrt.comm.init_device_mesh and shardrt.fsdp",
    "cuda": "the device is the one that shardrt.comm.init_device_mesh names",
    "inference_mode": "use shardrt.no_grad",
    "set_grad_enabled": "use shardrt.no_grad or shardrt.enable_grad",
    "autocast": "use shardrt.fsdp.MixedPrecisionPolicy",
    "set_num_threads": "use shardrt.set_threads",
    "Generator": "use numpy.random.default_rng(seed)",
    "compile": "kernels are compiled already",
}
TORCH |= dict.fromkeys(
    "float32 float64 float16 bfloat16 float double half int64 int32 int8 uint8 long int bool".split(),
    "types are strings, 'bfloat16', or NumPy's",
)


def missing_from(module: str, name: str, known: dict[str, str]) -> AttributeError:
    """The error for a name that the module of this path does not have."""
    text = f"{module} has no {name!r}"
    text = f"{text}: {known[name]}" if name in known else text
    return AttributeError(text, name=name, obj=sys.modules[module])


def missing(owner: object, name: str, known: dict[str, str]) -> AttributeError:
    """The error for an attribute that `owner` does not have."""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    return AttributeError(f"{text}: {known[name]}" if name in known else text, name=name, obj=owner)
