# SPDX-License-Identifier: Apache-2.0
"""Which sizes a model has: by its name, its configuration, or its number of parameters."""

import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from fmtsim.gemm.models import Model, models
from fmtsim.lab.memory.config_file import read_config, size_of_config
from fmtsim.lab.memory.sizes import Bias, ModelSize
from fmtsim.support.errors import ArgumentError, did_you_mean, shown

MOST = 10**15  # parameters; more than any model has


def model_size(model: Any) -> ModelSize:
    """Return the sizes of a model.

    Args:
        model: A name of ``fmtsim.lab.calibration.list_models()``, the path of a ``config.json`` of Hugging Face or of
            its folder, its contents as a dict, a configuration of transformers, or a ModelSize, which is returned.

    Raises:
        ArgumentError: There is no such model, or its sizes are not known or not those of such a transformer.
        DataError: The file is not a configuration.

    >>> model_size("llama-8b").blocks
    32
    """
    if isinstance(model, ModelSize):
        return model
    if isinstance(model, Mapping):
        return size_of_config(model, "model")
    if callable(getattr(model, "to_dict", None)):
        return size_of_config(model.to_dict(), type(model).__name__)
    if isinstance(model, os.PathLike) or (isinstance(model, str) and (os.sep in model or model.endswith(".json"))):
        path = Path(model).expanduser()
        path = path / "config.json" if path.is_dir() else path
        return size_of_config(read_config(path), str(path))
    if not isinstance(model, str) or model not in models():
        hint = did_you_mean(model, models()) if isinstance(model, str) else ""
        raise ArgumentError(
            f"model={shown(model)} is unknown{hint} (fmtsim.lab.calibration.list_models() has the names); or pass the "
            "path of a config.json, or a number of parameters"
        )
    return _known(models()[model])


def _known(model: Model) -> ModelSize:
    if not model.blocks:
        raise ArgumentError(
            f"model={model.name!r}: its blocks are of several kinds, or their number is not known here; pass its "
            "number of parameters, or the path of its config.json if that is of a family of decoders or of BERT's"
        )
    biases: tuple[Bias, ...] = ("qkv", "out", "mlp", "norm") if "l" in model.style else ()
    biases += ("qkv",) if "q" in model.style else ()
    biases += ("mlp",) if "m" in model.style else ()
    biases += ("head",) if "h" in model.style else ()
    same = ("name", "blocks", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "positions",
            "experts", "active")  # fmt: skip
    return ModelSize(
        **{name: getattr(model, name) for name in same},
        gated="g" in model.style, tied="t" in model.style, biases=tuple(dict.fromkeys(biases)),
    )  # fmt: skip


def parameter_count(value: Any) -> int | None:
    """Return a number of parameters that stands in a model's place, None for what is not a number.

    Raises:
        ArgumentError: It is not finite, below 1, or beyond any model.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not isfinite(value) or not 1 <= value <= MOST:
        raise ArgumentError(f"model={value} is not a number of parameters; pass 1 to 10**15, such as 7e9")
    return round(value)
