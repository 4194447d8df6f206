"""Get and set whole optimizer state by parameter names, with PyTorch's functions and layout.

{"state": {"head.weight": {"step": 3, "exp_avg": array, "exp_avg_sq": array}, ...},
 "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), ..., "params": ["head.weight", ...]}]}
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shardrt import device
from shardrt.checkpoint.pieces import counted, piece_of_state, set_steps
from shardrt.comm import objects
from shardrt.comm.first import FromFirst
from shardrt.comm.protocol import Communicator
from shardrt.fsdp.options.full import whole_on_first
from shardrt.nn.extents import take
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.placement import along_pipeline, on_first
from shardrt.nn.ranks import everyone, is_leader
from shardrt.optim.optimizer import Optimizer
from shardrt.optim.slices import Slice, exact_state

Array = Any


def get_optimizer_state_dict(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """The whole optimizer state by parameter names on rank 0; {} elsewhere.

    Collective.

    The layout above, with host arrays in the parameters' shapes: as PyTorch's with full_state_dict and
    cpu_offload. Each parameter's arrays go to rank 0 one by one: other ranks need no memory for it.
    Parameters that were never updated have no state.

    Raises:
        ValueError: if the optimizer has parameters that `model` has not.
    """
    names, first = _names(model, optimizer), is_leader(model)
    others = _agreed(names, model)
    device.current().wait_here()  # updates may still write the arrays
    found = {name: at for name, at in counted(model, optimizer).items() if at[0].steps[at[1]]}
    kinds = _kinds(names, optimizer)
    own = {name: _about(kinds[name], *at) for name, at in found.items() if at[0].members[at[1]][0].counts}
    parameters, state = dict(model.named_parameters()), {}
    for rank, about in enumerate([own] if others is None else objects.all_gather_object(others, own)):
        here = others is None or others.rank == rank
        for name, (steps, dtypes) in about.items():
            parameter, entry = parameters[name], {"step": steps}
            for kind, theirs in kinds[name].items():
                whole = _whole(parameter, found[name][0], kind) if here else None
                entry[theirs] = on_first(parameter.pipeline, whole, parameter.whole_shape, dtypes[kind])
            state[name] = entry
    groups = [
        {**group, **optimizer.constants, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups} if first else {}


def set_optimizer_state_dict(
    model: Module,
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    *,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a result of get_optimizer_state_dict: counts, arrays, settings of the groups.

    Collective.

    The state_dict() of a torch.optim optimizer works too: its numbers stand for parameters in the order of
    `param_groups`. A parameter without state starts as if it was never updated. Settings unknown to this
    optimizer are skipped.

    Args:
        state_dict: on every rank, or, with broadcast_from_rank0, on rank 0 alone, which sends it array by
            array.

    Raises:
        ValueError: on every rank, for parameters other than the optimizer's, an array that is missing or has
            another shape, or invalid settings; then nothing is changed.
    """
    _agreed(_names(model, optimizer), model)
    control = everyone(model, "set_optimizer_state_dict") if broadcast_from_rank0 else None
    about, arrays, error = None, {}, None
    if control is None or control.rank == 0:
        try:
            about, arrays = _read(model, optimizer, state_dict)
        except (ValueError, TypeError, KeyError, AttributeError) as failed:
            error, about = failed, {"error": _reported(failed)}
    if control is not None:
        about = objects.broadcast_object(control, about)
    if "error" in about:
        raise ValueError(f"set_optimizer_state_dict: {about['error']}") from error
    if control is not None:
        arrays = FromFirst(control, arrays)
    device.current().wait_here()  # updates may still use these arrays
    for group, settings in zip(optimizer.param_groups, about["groups"], strict=True):
        group.update({key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()})
    optimizer.take_in({id(p) for name, p in model.named_parameters() if about["steps"].get(name)})
    set_steps(model, optimizer, about["steps"])
    found = counted(model, optimizer)
    for name, kinds in _kinds(_names(model, optimizer), optimizer).items():  # all: ranks read the same arrays
        for own, theirs in kinds.items():
            key = f"{theirs}/{name}"
            values = arrays[key] if key in arrays else None
            if name in found:
                piece, position = found[name]
                _put(own, name, piece.members[position][0], piece, values)


def _about(kinds: Iterable[str], piece: Slice, position: int) -> tuple[int, dict[str, str]]:
    """(the update count of a member, the types of the whole arrays of its optimizer state)."""
    name, parameter = piece.name, piece.members[position][0]
    dtypes = {kind: piece_of_state(kind, name, parameter, piece).dtype.name for kind in kinds}
    return int(piece.steps[position]), dtypes


def _whole(parameter: Parameter, piece: Slice, kind: str) -> np.ndarray | None:
    """The numbers of a parameter's optimizer state on rank 0, as whole_on_first."""
    whole = whole_on_first(parameter, piece.as_shard(kind))
    return None if whole is None else exact_state(whole)


def _agreed(names: dict[int, str], model: Module) -> Communicator | None:
    """The communicator of a pipeline's ranks. Raises ValueError if their optimizers' parameters differ."""
    others = along_pipeline(model.parameters())
    if others is not None and objects.differing_ranks(others, list(names.values())):
        raise ValueError(
            "the optimizer has only the parameters of this rank's stages; make it with model.parameters()"
        )
    return others


def _names(model: Module, optimizer: Optimizer) -> dict[int, str]:
    """Map id to name of the optimizer's parameters, in the order of its groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [parameter.name for parameter in own if id(parameter) not in names]
    if strange:
        raise ValueError(f"the optimizer has parameters that are not in the model: {strange[:10]}")
    return {id(parameter): names[id(parameter)] for parameter in own}


def _kinds(names: dict[int, str], optimizer: Optimizer) -> dict[str, dict[str, str]]:
    """Name of a parameter -> its state, with PyTorch's names of it."""
    groups = enumerate(optimizer.param_groups)
    return {
        names[id(parameter)]: optimizer.state_names_of(number)
        for number, group in groups
        for parameter in group["params"]
    }


def _read(model: Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> tuple[dict, dict[str, Any]]:
    """({"steps": by name, "groups": settings of each}, "exp_avg/NAME" -> array), all checked."""
    own = list(_names(model, optimizer).values())
    state, groups = state_dict["state"], state_dict["param_groups"]
    given = [name for group in groups for name in group["params"]]
    if all(type(name) is int for name in given) and len(given) == len(own):
        names = dict(zip(given, own, strict=True))
    else:
        names = {name: name for name in given}
    missing, extra = sorted(set(own) - set(names.values())), sorted(map(str, set(names.values()) - set(own)))
    if missing or extra:
        raise ValueError(f"parameters missing from the state: {missing[:10]}; unexpected: {extra[:10]}")
    steps, arrays = {}, {}
    shapes = {name: parameter.whole_shape for name, parameter in model.named_parameters()}
    kinds = _kinds(_names(model, optimizer), optimizer)
    for key, name in names.items():
        expected = sorted(kinds[name].values())
        found = {theirs: state.get(key, {}).get(theirs) for theirs in expected}
        found = {theirs: values for theirs, values in found.items() if values is not None}
        if found and len(found) < len(expected):
            raise ValueError(f"{name!r} has state {sorted(found)}, expected {expected}")
        for theirs, values in found.items():
            if tuple(values.shape) != shapes[name]:
                raise ValueError(
                    f"{theirs} of {name!r} must have shape {shapes[name]}, got {tuple(values.shape)}"
                )
            arrays[f"{theirs}/{name}"] = values
        steps[name] = _count(name, state.get(key, {}).get("step", 1 if found else 0))
        if steps[name] and len(found) < len(expected):
            raise ValueError(f"the state of {name!r} has a step, but not all of {expected}")
    return {"steps": steps, "groups": _settings(optimizer, groups, names, own)}, arrays


def _settings(optimizer: Optimizer, groups: list[dict], names: dict[Any, str], own: list[str]) -> list[dict]:
    """The new settings of each optimizer group, from the given group with the same parameters."""
    where = {names[key]: number for number, group in enumerate(groups) for key in group["params"]}
    found, stop = [], 0
    for group in optimizer.param_groups:
        start, stop = stop, stop + len(group["params"])
        theirs = {where[name] for name in own[start:stop]}
        if len(theirs) > 1:
            raise ValueError(
                f"the parameter group of {own[start]!r} has parameters from several groups of the state"
            )
        known = group.keys() - {"params"}
        given = groups[theirs.pop()] if theirs else {}
        settings = {key: _plain(value) for key, value in given.items() if key in known and value is not None}
        optimizer.checked({**settings, "params": []})
        for key, value in optimizer.constants.items():
            if key in given and given[key] != value:
                raise ValueError(f"the state has {key} {given[key]}, but this optimizer has {value}")
        found.append(settings)
    return found


def _plain(value: Any) -> Any:
    """A setting as a JSON type; PyTorch's may be tensors."""
    if isinstance(value, str | int):
        return value
    return [float(v) for v in value] if isinstance(value, tuple | list) else float(value)


def _count(name: str, value: Any) -> int:
    steps = float(value)
    if not 0 <= steps < 2**53 or steps != int(steps):
        raise ValueError(f"the step of {name!r} must be an integer of at least 0, got {steps}")
    return int(steps)


def _put(kind: str, name: str, parameter: Parameter, piece: Slice, values: Any) -> None:
    """Set this rank's piece of a parameter's optimizer state; to 0 without values."""
    here = piece_of_state(kind, name, parameter, piece)
    if values is None:
        here.clear()
    elif here.array.size:
        here.write(0, np.ascontiguousarray(take(parameter.extents, np.asarray(values)), here.dtype))


def _reported(error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error)
    return f"this is no optimizer's state ({type(error).__name__}: {error})"
