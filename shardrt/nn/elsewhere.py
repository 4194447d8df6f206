"""Names that a user of PyTorch looks for in nn, in optim and on their objects and finds elsewhere here.

docs/howto/from_pytorch.md has all of them side by side; shardrt/functional/elsewhere.py has those of
functions.
"""

from shardrt.functional.elsewhere import missing, missing_from

__all__ = ["INIT", "LAYER", "MODULE", "OPTIM", "OPTIMIZER", "missing", "missing_from"]

_DEVICE = "a model is on the device that init_device_mesh names"
_TYPE = "use fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=...))"
_BACKWARD_HOOK = (
    "use output.register_hook in a forward hook, or register_post_accumulate_grad_hook of a parameter"
)
_PREFETCH = "use fully_shard(..., prefetch=n)"

MODULE = {
    "set_requires_gradient_sync": "use `with shardrt.fsdp.no_sync(model):`",
    "set_is_last_backward": "use `with shardrt.fsdp.no_sync(model):` for all backwards but the last",
    "no_sync": "use `with shardrt.fsdp.no_sync(model):`",
    "set_gradient_divide_factor": "use shardrt.fsdp.set_gradient_divide_factor(model, factor)",
    "set_reduce_scatter_divide_factor": "use shardrt.fsdp.set_gradient_divide_factor(model, factor)",
    "set_reshard_after_forward": "use fully_shard(..., reshard_after_forward=...)",
    "set_modules_to_forward_prefetch": _PREFETCH,
    "set_modules_to_backward_prefetch": _PREFETCH,
    "unshard": "use shardrt.fsdp.unshard(module)",
    "reshard": "use shardrt.fsdp.reshard(module)",
    "summon_full_params": "use `with shardrt.fsdp.full_parameters(module):`",
    "clip_grad_norm_": "use shardrt.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    "to": f"{_DEVICE}; for types, {_TYPE}",
    "cuda": _DEVICE,
    "cpu": _DEVICE,
    "half": _TYPE,
    "bfloat16": _TYPE,
    "float": _TYPE,
    "double": "use dtype=np.float64 for each layer",
    "compile": "kernels are compiled already",
    "register_parameter": "assign it: module.name = Parameter(...)",
    "add_module": "assign it: module.name = other",
    "register_module": "assign it: module.name = other",
    "register_full_backward_hook": _BACKWARD_HOOK,
    "register_full_backward_pre_hook": _BACKWARD_HOOK,
    "register_backward_hook": _BACKWARD_HOOK,
    "buffers": "use named_buffers()",
}

_ATTENTION = "use shardrt.functional.self_attention in your forward, as shardrt.models.gpt.Attention does"
_IN_FORWARD = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CosineSimilarity": "cosine_similarity",
    "GLU": "glu",
    "Hardsigmoid": "hardsigmoid",
    "Hardswish": "hardswish",
    "HuberLoss": "huber_loss",
    "KLDivLoss": "kl_div",
    "L1Loss": "l1_loss",
    "LogSigmoid": "logsigmoid",
    "Mish": "mish",
    "NLLLoss": "nll_loss",
    "ReLU6": "relu6",
    "SmoothL1Loss": "smooth_l1_loss",
    "Unflatten": "reshape",
    "Upsample": "interpolate",
    "ZeroPad2d": "pad",
}
LAYER = {layer: f"use shardrt.functional.{function}" for layer, function in _IN_FORWARD.items()}
LAYER |= dict.fromkeys(
    "MultiheadAttention Transformer TransformerEncoder TransformerDecoder TransformerEncoderLayer "
    "TransformerDecoderLayer".split(),
    _ATTENTION,
)
LAYER |= dict.fromkeys("RNN LSTM GRU LSTMCell GRUCell".split(), "there are no recurrent layers")
LAYER |= dict.fromkeys(
    "DataParallel parallel".split(), 'use shardrt.fsdp.fully_shard(..., strategy="NO_SHARD")'
)
LAYER |= {
    "functional": "use `from shardrt import functional`",
    "Buffer": "use module.register_buffer(name, array)",
    "SyncBatchNorm": "use shardrt.nn.synchronise_batch_norm(model, mesh)",
}

_RULE = "give the layer or Parameter the rule, init="
_OWN_VALUES = "or set values, before the model is sharded: parameter.data = array"
INIT = dict.fromkeys(
    "normal_ trunc_normal_ xavier_normal_ kaiming_normal_".split(),
    f"{_RULE}shardrt.nn.init.Normal(mean, std), {_OWN_VALUES}",
)
INIT |= dict.fromkeys(
    "uniform_ xavier_uniform_ kaiming_uniform_".split(),
    f"{_RULE}shardrt.nn.init.Uniform(low, high), {_OWN_VALUES}",
)
INIT |= {
    "zeros_": f"{_RULE}shardrt.nn.init.Zeros(), {_OWN_VALUES}",
    "ones_": f"{_RULE}shardrt.nn.init.Ones(), {_OWN_VALUES}",
    "constant_": f"{_RULE}shardrt.nn.init.Constant(value), {_OWN_VALUES}",
    "orthogonal_": "set values, before the model is sharded: parameter.data = array",
}

OPTIM = {
    "Adam": "use shardrt.optim.AdamW(..., weight_decay=0.0), which is Adam",
    "lr_scheduler": "a schedule is a function of the step, such as shardrt.optim.warmup_cosine(step, ...): "
    'write its value to group["lr"] of optimizer.param_groups',
}

_CHECKPOINTS = "use shardrt.checkpoint.CheckpointManager, which saves and restores it with the model, or"
OPTIMIZER = {
    "state_dict": f"{_CHECKPOINTS} shardrt.checkpoint.get_optimizer_state_dict(model, optimizer)",
    "load_state_dict": f"{_CHECKPOINTS} shardrt.checkpoint.set_optimizer_state_dict(model, optimizer, state)",
    "state": f"{_CHECKPOINTS} shardrt.checkpoint.get_optimizer_state_dict(model, optimizer)",
}
