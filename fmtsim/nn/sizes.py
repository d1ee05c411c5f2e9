# SPDX-License-Identifier: Apache-2.0
"""Whether a layer's sizes fit what its quantisers do in groups: rotations and corrections."""

from fmtsim.gemm.layers.config import LinearConfig, product_of
from fmtsim.scaling.hadamard_matrix import base_of
from fmtsim.spec.quantizer import Hadamard, Quantizer, Sparsity
from fmtsim.support.errors import ArgumentError


def size_fault(config: LinearConfig, tokens: int | None, outputs: int, inputs: int) -> str | None:
    """Return what does not fit a layer ``[outputs, inputs]`` with so many rows of x, or None where all does.

    Args:
        config: The layer.
        tokens: Rows of x; None looks at what does not depend on them alone.
        outputs: Rows of w.
        inputs: Columns of w.
    """
    inner = {"f": inputs, "d": outputs, "w": tokens}
    outer = {"x_f": tokens, "w_f": outputs, "g_d": tokens, "w_d": inputs, "g_w": outputs, "x_w": inputs}
    for name, quantizer in config.operands.items():
        fault = _fault(quantizer, inner[name[2]], outer[name])
        if fault is not None:
            return f"{product_of(name)} {name}: {fault}"
    return None


def _fault(quantizer: Quantizer, inner: int | None, outer: int | None) -> str | None:
    for transform in quantizer.transforms:
        if isinstance(transform, Sparsity):
            uneven = [n for n in (inner, outer if transform.tiles else None) if n is not None and n % 4]
            if uneven:
                return f"2:4 sparsity needs groups of 4, which do not divide {uneven[0]}"
        length = inner if not isinstance(transform, Hadamard) or transform.axis == "inner" else outer
        if not isinstance(transform, Hadamard) or length is None:
            continue
        if transform.size is not None and length % transform.size:
            return f"Hadamard size={transform.size} does not divide {length}"
        if transform.size is None:
            try:
                base_of(length)
            except ArgumentError as error:
                return f"a Hadamard matrix of the whole axis does not fit: {error}"
    group = None if quantizer.scaling is None else quantizer.scaling.eden
    if group is not None and inner is not None and inner % group:
        return f"Scaling eden={group} does not divide {inner}"
    return None
