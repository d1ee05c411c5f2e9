# SPDX-License-Identifier: Apache-2.0
"""What the oracles say of whole products, as tensors."""

import math

import torch

from fmtsim import Datapath, GemmPlan, get_format, get_unit
from fmtsim.gemm.products.operator import output_format
from fmtsim.spec.gemm_spec import GemmSpec
from tests.support.bits import INTEGERS
from tests.support.product_oracle import epilogue_oracle, gemm_oracle

NAN = {1: 0x7F, 2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}


def definition(a, b=None, unit="hopper.wgmma", plan=None, accumulate=None, scale=None) -> GemmSpec:
    """Return what a unit by name, or a datapath, does with operands of two formats."""
    a, b = get_format(a), get_format(b or a)
    path = unit if isinstance(unit, Datapath) else get_unit(unit).mode(a, b, accumulate, scale)
    return GemmSpec(datapath=path, plan=plan or GemmPlan(), a=a, b=b)


def numbers(t: torch.Tensor) -> list:
    """Return a matrix as Python floats, or integers."""
    return t.to(torch.float64).tolist() if t.dtype.is_floating_point else t.tolist()


def tensor(values: list, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Put numbers that lie on a dtype's format into it, NaN in the bits of the units."""
    exact = torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype).reshape(shape)
    if not dtype.is_floating_point:
        return exact
    integers = INTEGERS[dtype.itemsize]
    return exact.to(dtype).view(integers).masked_fill(exact.isnan(), NAN[dtype.itemsize]).view(dtype)


def sums(a: torch.Tensor, b: torch.Tensor, spec: GemmSpec, dtype=torch.float32, **rest) -> torch.Tensor:
    """Return the reduced sums of ``a b^T``, b being [N, K]."""
    rest = {name: numbers(x) if isinstance(x, torch.Tensor) else x for name, x in rest.items()}
    shape = (a.shape[0], b.shape[0])
    return tensor(gemm_oracle(numbers(a), numbers(b), spec, **rest), dtype, shape)


def finished(
    reduced: torch.Tensor, dtype: torch.dtype, rule="scale", row=None, column=None, bias=None, result_scale=None,
    bias_after_rounding=False,
) -> torch.Tensor:  # fmt: skip
    """Return the outputs that the oracle makes of reduced sums."""
    m, n = reduced.shape
    rows = None if row is None else row.reshape(-1).expand(m).tolist()
    columns = None if column is None else column.reshape(-1).expand(n).tolist()
    added = None if bias is None else bias.to(torch.float64).tolist()
    result_scale = None if result_scale is None else result_scale.item()
    given = reduced.tolist()
    arithmetic = output_format(reduced.dtype)
    values = [
        epilogue_oracle(
            given[i][j], output_format(dtype), rule=rule,
            scales=None if rows is None else (rows[i], columns[j]),
            bias=None if added is None else added[j], bias_after_rounding=bias_after_rounding,
            result_scale=result_scale, arithmetic=arithmetic,
        )
        for i in range(m) for j in range(n)
    ]  # fmt: skip
    assert all(isinstance(value, float) or math.isnan(value) for value in values)
    return tensor(values, dtype, (m, n))
