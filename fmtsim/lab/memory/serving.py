# SPDX-License-Identifier: Apache-2.0
"""What serving a model needs of memory on each device."""

from math import ceil
from typing import Any

from fmtsim.formats.registry import get_format
from fmtsim.lab.memory.estimate import MemoryEstimate, MemoryLine, bits_per_element, positive
from fmtsim.lab.memory.sizes import ModelSize, model_size, parameter_count
from fmtsim.lab.memory.states import Weight, per_element, stored_bytes, weights_of
from fmtsim.support.errors import ArgumentError

NOT_COUNTED = (
    "Not counted: activations of a step, blocks of the cache that are not full, workspaces of libraries, CUDA graphs; "
    "windows of attention, which keep fewer tokens"
)


def serving_memory(
    model: Any, *, weights: str = "bf16", kv_format: str = "bf16", context: int = 0, requests: int = 1, devices: int = 1
) -> MemoryEstimate:
    """Estimate the memory that serving a model needs on each device, by arithmetic.

    Args:
        model: As of ``training_memory``; a number of parameters has no cache.
        weights: Format of the weights. One below 16 bits is that of linear layers; embeddings, head and vectors are
            bfloat16.
        kv_format: Format of the cache of keys and values.
        context: Tokens of each request that the cache keeps; 0 leaves the cache out.
        requests: Requests at once.
        devices: They share out each layer (tensor parallel). Heads of keys and values are shared out, too, where there
            are enough; what latent attention keeps is on each device.

    Returns:
        A ``MemoryEstimate`` with the lines ``"weights"`` and ``"KV cache"``. Deterministic.

    Raises:
        ArgumentError: A name is unknown, or a number is not possible.
        FormatError: A format is unknown.
        DataError: The file is not a configuration.

    Source of the cache of latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1.

    >>> import fmtsim
    >>> fmtsim.lab.serving_memory("llama2-70b", context=4096)["KV cache"]  # 2 x 80 x 8 x 128 x 2 bytes x 4096
    1342177280
    """
    stored, cached = get_format(weights).name, get_format(kv_format).name
    for name, value, least in (("context", context, 0), ("requests", requests, 1), ("devices", devices, 1)):
        positive(name, value, least)
    count = parameter_count(model)
    if count is not None and context:
        raise ArgumentError(
            f"context={context} needs the sizes of a model, not a number of parameters alone; pass a name such as "
            "'llama-8b', or a config.json"
        )
    size = None if count is not None else model_size(model)
    matrices = weights_of(size) if size is not None else (Weight(name="weights", shape=(count or 1,), linear=True),)
    total, count = stored_bytes(matrices, stored), sum(w.elements for w in matrices)
    split = f" / {devices} (tensor parallel)" if devices > 1 else ""
    formula = per_element(count, total) + split
    lines = [MemoryLine(name="weights", kept=stored, bytes=ceil(total / devices), formula=formula)]
    if size is not None and context:
        lines.append(_cache(size, cached, context * requests, devices))
    what = [f"{size.name if size else 'a model'}: {count:,} parameters, served"]
    what += [f"{requests} x {context} tokens"] if context else []
    what += [f"{devices} devices"] if devices > 1 else []
    return MemoryEstimate(what=", ".join(what), parameters=count, lines=tuple(lines), notes=(NOT_COUNTED,))


def _cache(size: ModelSize, fmt: str, tokens: int, devices: int) -> MemoryLine:
    parts = 1 if size.latent is not None else min(devices, size.kv_heads)
    bits = bits_per_element(fmt, size.head_dim if size.latent is None else size.latent.values)
    token_bytes = size.blocks * size.cached * bits / 8
    formula = f"{size.blocks} blocks x {size.cached:,} elements x {bits / 8:g} bytes x {tokens:,} tokens"
    formula += f" / {parts} (heads)" if parts > 1 else ""
    return MemoryLine(name="KV cache", kept=fmt, bytes=ceil(token_bytes * tokens / parts), formula=formula)
