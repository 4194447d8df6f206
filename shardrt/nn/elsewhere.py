"""Names that a user of PyTorch looks for on a module or an optimizer and finds elsewhere here, and where.

docs/from_pytorch.md has all of them side by side; shardrt/functional/elsewhere.py has those of functions.
"""

from shardrt.functional.elsewhere import missing

__all__ = ["MODULE", "OPTIMIZER", "missing"]

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

_CHECKPOINTS = "use shardrt.checkpoint.Checkpoints, which saves and restores it beside the model, or"
OPTIMIZER = {
    "state_dict": f"{_CHECKPOINTS} shardrt.checkpoint.get_optimizer_state_dict(model, optimizer)",
    "load_state_dict": f"{_CHECKPOINTS} shardrt.checkpoint.set_optimizer_state_dict(model, optimizer, state)",
    "state": f"{_CHECKPOINTS} shardrt.checkpoint.get_optimizer_state_dict(model, optimizer)",
}
