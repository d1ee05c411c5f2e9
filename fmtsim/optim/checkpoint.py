# SPDX-License-Identifier: Apache-2.0
"""Saved states: what they are checked for, and how one scheme's become another's when that is asked for."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fmtsim.optim import codec, stepping
from fmtsim.optim.catalogue import get_scheme, list_schemes
from fmtsim.optim.rules import CONSTANTS, Rule
from fmtsim.spec.optimizer import Scheme, StateFormat, key_of
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_items

VERSION = 1
TORCH_NAMES = {"first": ("exp_avg", "momentum_buffer"), "second": ("exp_avg_sq",)}
_HEADER = {"version": int, "rule": str, "scheme": str, "record": str, "seed": int}
Formats = Mapping[str, StateFormat]


def header(rule: Rule, scheme: Scheme, seed: int) -> dict[str, Any]:
    """Return what a saved state says about itself; ``record`` tells apart schemes of one name."""
    return {"version": VERSION, "rule": rule.name, "scheme": scheme.name, "record": repr(scheme), "seed": seed}


def groups(state_dict: Mapping[str, Any], present: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved hyperparameters, what schedulers keep with them too, with the parameters that are here.

    Raises:
        ArgumentError: There are other groups, or groups of other sizes.
    """
    check_items(state_dict, {"param_groups": list[dict[str, Any]]}, "the state")
    for group in state_dict["param_groups"]:
        check_items(group, {"params": list[int]}, "a group of the state")
    sizes = [[len(group["params"]) for group in param_groups] for param_groups in (state_dict["param_groups"], present)]
    if sizes[0] != sizes[1]:
        raise ArgumentError(f"the state is of groups of {sizes[0]} parameters, the optimizer has groups of {sizes[1]}")
    ours = "fmtsim" in state_dict
    return [
        {**here, **{k: _copied(k, v) for k, v in saved.items() if ours or k in here}, "params": here["params"]}
        for saved, here in zip(state_dict["param_groups"], present, strict=True)
    ]


def _copied(name: object, value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # of a generator, say, which nothing saves
        raise ArgumentError(f"a group of the state has {shown(name)}: {shown(value)}, which is not a number") from None


def states(
    state_dict: Mapping[str, Any],
    parameters: Sequence[Tensor],
    formats: Sequence[Formats],
    rule: Rule,
    scheme: Scheme,
    convert: bool,
) -> list[dict[str, Any]]:
    """Return what a saved state holds of each parameter, on the parameters' devices; nothing where it has no state.

    Raises:
        ArgumentError: As ``QuantizedOptimizer.load_state_dict`` says.
    """
    source = _source(state_dict, rule, scheme, convert)
    order = [index for group in state_dict["param_groups"] for index in group["params"]]
    seed = state_dict.get("fmtsim", {}).get("seed", 0)
    loaded: list[dict[str, Any]] = []
    for index, (key, p, expected) in enumerate(zip(order, parameters, formats, strict=True)):
        saved = state_dict["state"].get(key)
        if not saved:
            loaded.append({})
        elif source is scheme:
            loaded.append(_same(index, saved, p, expected, rule))
        else:
            # Decode a saved state as its scheme says and encode it as this one does.
            shape = tuple(p.shape)
            values = _torch_values(index, saved, p, rule) if source is None else {}
            if source is not None:
                _check_shape(index, saved["shape"], p)
                here = {
                    name: value.to(p.device) if isinstance(value, Tensor) else value for name, value in saved.items()
                }
                for slot, fmt in source.formats(shape, rule.slots).items():
                    if slot in here:
                        values[slot] = codec.decode(stepping.parts_of(here, slot), fmt, shape)
            step = int(saved["step"])
            state = stepping.start(values.get("weights", p), expected, rule, seed, index)
            for slot in rule.slots:
                random_key = key_of(seed, step, index, slot)
                stepping.put(state, slot, codec.encode(values[slot].contiguous(), expected[slot], {}, random_key))
            loaded.append(
                state | {"step": step} | {name: saved[name].to(p.device) for name in CONSTANTS if name in saved}
            )
    return loaded


def _source(state_dict: Mapping[str, Any], rule: Rule, scheme: Scheme, convert: bool) -> Scheme | None:
    """Return the scheme of a saved state, None for one of ``torch.optim``; raise where it may not be loaded."""
    check_items(state_dict, {"state": dict[int, dict[str, Any]]}, "the state")
    said = state_dict.get("fmtsim")
    how = f"pass convert=True to decode it and encode it anew as {scheme.name!r}"
    if said is None:
        if not convert:
            raise ArgumentError(f"the state is one of torch.optim, the optimizer keeps {scheme.name!r}; {how}")
        return None
    check_items(said, _HEADER, "the state's 'fmtsim'")
    if said["version"] != VERSION:
        raise ArgumentError(f"the state has version {said['version']}, this fmtsim reads {VERSION}; update fmtsim")
    if said["rule"] != rule.name:
        raise ArgumentError(
            f"the state is of the rule {said['rule']!r}, the optimizer's is {rule.name!r}; use that rule"
        )
    if said["record"] == repr(scheme):
        return scheme
    name = said["scheme"]
    source = get_scheme(name) if name in list_schemes() else None
    if source is None or repr(source) != said["record"]:
        raise ArgumentError(
            f"the state is kept as a {name!r} that is neither the optimizer's scheme nor the catalogue's: a record of "
            "your own, or of another version of fmtsim; pass that record as the optimizer's state=, or load the "
            f"weights alone and begin with new states as {scheme.name!r}"
        )
    if not convert:
        raise ArgumentError(f"the state is kept as {name!r}, the optimizer's as {scheme.name!r}; {how}")
    return source


def _same(index: int, saved: Mapping[str, Any], p: Tensor, formats: Formats, rule: Rule) -> dict[str, Any]:
    """Return a copy of a saved state after holding every tensor to the one that a first step would make."""
    model = stepping.start(p.detach(), formats, rule, 0, 0)
    count = saved.get("step")
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_floating_point() and not count.is_meta:
        saved = {**saved, "step": int(count)}  # of an optimizer that counts on the device
    if set(saved) != set(model):
        raise ArgumentError(f"parameter {index}: the state has {sorted(saved)}, it should have {sorted(model)}")
    check_items(saved, {"shape": list[int]}, f"the state of parameter {index}")
    result: dict[str, Any] = {}
    for name, expected in model.items():
        value = saved[name]
        if not isinstance(value, Tensor if isinstance(expected, Tensor) else type(expected)):
            raise ArgumentError(
                f"parameter {index}: {name} is {shown(value)}, it should be a {type(expected).__name__}"
            )
        if not isinstance(expected, Tensor):
            result[name] = copy.deepcopy(value)
            continue
        if value.is_meta and not p.is_meta:
            raise ArgumentError(f"parameter {index}: {name} is on the meta device and holds no numbers; save real ones")
        if value.dtype != expected.dtype or value.shape != expected.shape:
            raise ArgumentError(
                f"parameter {index}: {name} is {value.dtype} {list(value.shape)}, "
                f"it should be {expected.dtype} {list(expected.shape)}"
            )
        result[name] = value.detach().to(p.device).clone()
    _check_shape(index, saved["shape"], p)
    return result


def _torch_values(index: int, saved: Mapping[str, Any], p: Tensor, rule: Rule) -> dict[str, Tensor]:
    """Return the moments of an optimizer of torch."""
    values = {}
    for slot in rule.slots:
        name = next((name for name in TORCH_NAMES[slot] if isinstance(saved.get(name), Tensor)), None)
        if name is None:
            raise ArgumentError(f"parameter {index}: the state has {sorted(saved)}, none of {TORCH_NAMES[slot]}")
        _check_shape(index, saved[name].shape, p)
        values[slot] = saved[name].detach().to(p.device, torch.float32)
    if "step" not in saved:
        raise ArgumentError(f"parameter {index}: the state does not say its step; it cannot be converted")
    return values


def _check_shape(index: int, shape: Sequence[int], p: Tensor) -> None:
    if list(shape) != list(p.shape):
        raise ArgumentError(f"parameter {index} is {list(p.shape)}, its state is of {list(shape)}")
