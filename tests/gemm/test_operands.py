"""Operands as verbs read them: FP4 numbers in FP8, and values that a format lacks."""

import pytest
import torch

from fmtsim.errors import ArgumentError
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products import operands, operator
from fmtsim.gemm.products.matmul import mm
from fmtsim.gemm.products.operands import read_operand
from fmtsim.gemm.products.operator import run_gemm
from fmtsim.quantize import decode
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from tests.support.bits import assert_same_bits

BYTES = torch.arange(256, dtype=torch.uint8)
E2M1, TF32, E3M4 = get_format("e2m1"), get_format("tf32"), get_format("e3m4")


def fp4_values(packed):
    """Return the numbers of bytes [..., n] in order, by the catalogue: the even one in the low nibble."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return decode(codes, "e2m1", out_dtype=torch.float32)


@pytest.mark.parametrize("piece", [1, 7, 1 << 18])
@pytest.mark.parametrize("shape", [(1, 256), (256, 1), (2, 8, 16)])
def test_every_byte_of_fp4_keeps_its_two_numbers(shape, piece, monkeypatch):
    monkeypatch.setattr(operands, "_PIECE", piece)
    packed = BYTES.reshape(shape)
    found = read_operand(packed.view(torch.float4_e2m1fn_x2), E2M1)
    assert found.dtype == torch.float8_e4m3fn
    assert_same_bits(found.float(), fp4_values(packed))


def test_fp4_with_strides_and_without_elements():
    packed = BYTES.reshape(16, 16)
    found = read_operand(packed[::3, 2:9].view(torch.float4_e2m1fn_x2), E2M1)
    assert_same_bits(found.float(), fp4_values(packed[::3, 2:9]))
    assert read_operand(packed[:0].view(torch.float4_e2m1fn_x2), E2M1).shape == (0, 32)
    assert read_operand(packed[:, :0].view(torch.float4_e2m1fn_x2), E2M1).shape == (16, 0)


def product(a, fmt):
    spec = GemmSpec(datapath=Datapath(), plan=GemmPlan(), a=fmt, b=fmt)
    return run_gemm(a, torch.ones(1, a.shape[1], dtype=a.dtype), spec)


@pytest.mark.parametrize("place", [(0, 0), (3, 70), (6, 99)])
@pytest.mark.parametrize(
    ("fmt", "dtype", "wrong"), [(TF32, torch.float32, 1 + 2.0**-11), (E3M4, torch.bfloat16, 1024.0)]
)
def test_a_value_that_the_format_lacks_is_found_in_every_piece(fmt, dtype, wrong, place, monkeypatch):
    monkeypatch.setattr(operator, "_VALUES", 150)  # rows of 100: one in a piece
    a = torch.full((7, 100), -0.0, dtype=dtype)
    a[2, 5] = torch.nan
    assert product(a, fmt).shape == (7, 1)
    a[place] = wrong
    with pytest.raises(ArgumentError, match=f"a holds {wrong:g}, which is not a value of {fmt.name}"):
        product(a, fmt)


@pytest.mark.parametrize("rows", [7, 1 << 20])
def test_a_gpu_is_asked_once_for_both_operands(rows, monkeypatch):
    """Here a CPU stands in for it; ``rows``: numbers of a piece."""
    monkeypatch.setattr(operator, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(operator, "_ON_GPUS", 100 * rows)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    a = torch.full((9, 100), 1.0)
    searched = []
    real = operator._require_each
    monkeypatch.setattr(operator, "_require_each", lambda *given: searched.append(given[0]) or real(*given))
    assert product(a, TF32).shape == (9, 1)
    assert searched == []
    a[4, 3] = torch.nan  # which no comparison finds equal
    assert product(a, TF32)[4].isnan().all() and searched == ["a", "b"]
    a[8, 99] = 1 + 2.0**-11
    with pytest.raises(ArgumentError, match="a holds 1.00049, which is not a value of tf32"):
        product(a, TF32)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    product(a, TF32)  # nobody looks


def test_numbers_that_a_verb_rounded_are_not_looked_at(monkeypatch):
    looked = []
    monkeypatch.setattr(operator, "_require_values", lambda *operands: looked.append(operands))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    mm(x, x.mT, unit="hopper.wgmma", allow_tf32=True)
    mm(torch.zeros(3, 4, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), unit="exact", a_format="e2m3",
       b_format="e2m3")  # fmt: skip
    assert looked == []
    mm(x.bfloat16(), x.mT.bfloat16(), unit="hopper.wgmma")
    mm(x, torch.zeros(4, 2, dtype=torch.uint8), unit="exact", b_format="e2m3")
    assert len(looked) == 2


def test_a_compiled_product_of_fp4_has_the_bits_of_a_plain_one():
    a, b = (BYTES[:128].reshape(4, 32) ^ mask for mask in (0, 170))

    def multiply(a, b):
        return mm(a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2).t(), unit="blackwell.tcgen05")

    torch._dynamo.reset()
    assert_same_bits(torch.compile(multiply, backend="eager", fullgraph=True)(a, b), multiply(a, b))
