# SPDX-License-Identifier: Apache-2.0
"""Load the weights of a file into a model: all of them, in its dtypes; an error names the first that does not fit."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.formats.interop import dtype_name
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError, did_you_mean, first_line

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_WITHIN = ("state_dict", "model", "model_state_dict")  # under which others keep the weights beside other things


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load every parameter and buffer of a model from a file, in place.

    Weights that share memory (a head tied to an embedding) need be there once.

    Raises:
        ArgumentError: The suffix is unknown, or a key is missing, too many, of another shape, or of a dtype that the
            model's does not hold; the message names the first.
        DataError: The file cannot be read, or holds no tensors by name.
    """
    path = Path(path).expanduser()
    tensors, own = _read(path), model.state_dict(keep_vars=True)
    for name, t in tensors.items():
        if name not in own:
            raise _differs(path, model, f"has {name!r}, which the model has not{did_you_mean(name, own)}")
        mine = own[name]
        if t.shape != mine.shape:
            raise _differs(path, model, f"has {name!r} of {list(t.shape)}, the model of {list(mine.shape)}")
        if torch.promote_types(t.dtype, mine.dtype) != mine.dtype:
            raise ArgumentError(
                f"--checkpoint {path}: {name!r} is {_dtype(t)} and the model's {_dtype(mine)}, which would round it; "
                f"pass --dtype {_dtype(t)}"
            )
    there = {own[name].data_ptr() for name in tensors}
    absent = [name for name, t in own.items() if name not in tensors and t.numel() and t.data_ptr() not in there]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise _differs(path, model, f"lacks {absent[0]!r}{more}")
    model.load_state_dict(tensors, strict=False)


def _differs(path: Path, model: nn.Module, what: str) -> ArgumentError:
    return ArgumentError(
        f"--checkpoint {path} does not fit {type(model).__name__}: it {what}; name the model that it was saved from"
    )


def _read(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise ArgumentError(f"--checkpoint {path}: there is no such file; pass one that ends in {', '.join(SUFFIXES)}")
    if path.suffix not in SUFFIXES:
        raise ArgumentError(f"--checkpoint {path} does not end in {', '.join(SUFFIXES)}; pass a file of weights")
    if path.suffix == ".safetensors":
        try:
            read = importlib.import_module("safetensors.torch").load_file
        except ImportError:
            raise FmtsimError(f"--checkpoint {path} needs safetensors; pip install 'fmtsim[train]'") from None
    else:
        read = _unpickled
    try:
        found = read(path)
    except Exception as error:  # of damaged bytes readers raise anything
        raise DataError(f"--checkpoint {path} cannot be read: {first_line(error)}; save the weights again") from None
    if not isinstance(found, Mapping) or not found or not all(isinstance(t, Tensor) for t in found.values()):
        raise DataError(f"--checkpoint {path} holds no tensors by name; save model.state_dict()")
    return found


def _unpickled(path: Path) -> Any:
    found = torch.load(path, map_location="cpu", weights_only=True)
    within = [found[name] for name in _WITHIN if isinstance(found, Mapping) and isinstance(found.get(name), Mapping)]
    return within[0] if within else found


def _dtype(t: Tensor) -> str:
    return dtype_name(t.dtype)
