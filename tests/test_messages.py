# SPDX-License-Identifier: Apache-2.0
"""Forty mistakes that people make: each error says what was given, what is allowed, and what to do next."""

import warnings

import numpy
import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.support.errors import FmtsimError

X = torch.linspace(-2, 2, 6 * 64).reshape(6, 64)
A, B = torch.ones(4, 8), torch.ones(8, 2)
FP8 = torch.ones(16, 32).to(torch.float8_e4m3fn)
ONE = torch.tensor(1.0)
UNIT = {"target": "hopper.wgmma"}


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def other_state():
    return fmtsim.recipe_state(fmtsim.convert(nn.Sequential(nn.Linear(64, 64)), "te_delayed"))


# What is called, and the words that say what was given, what is allowed, and what to do.
MISTAKES = {
    "a format that does not exist": (
        lambda: fmtsim.quantize(X, "e4m33x"),
        "'e4m33x'",
        "did you mean",
        "list_formats()",
    ),
    "a format beyond its limits": (
        lambda: fmtsim.quantize(X, "e4m33"),
        "mantissa_bits=33",
        "choose 0 to 23",
        "register",
    ),
    "integers": (lambda: fmtsim.quantize(X.int(), "e4m3"), "torch.int32", "float16, bfloat16", ".float()"),
    "complex numbers": (
        lambda: fmtsim.quantize(X.to(torch.complex64), "e4m3"),
        "complex64",
        "float16",
        "imaginary parts",
    ),
    "a list": (lambda: fmtsim.quantize([1.0, 2.0], "e4m3"), "x is list", "not a tensor", "pass torch.tensor(x)"),
    "an array of integers": (
        lambda: fmtsim.quantize(numpy.arange(3), "e4m3"),
        "int64",
        "float16",
        "x.astype('float32')",
    ),
    "None": (lambda: fmtsim.mm(None, B, **UNIT), "a is NoneType", "not a tensor", "pass torch.tensor(a)"),
    "a sparse tensor": (lambda: fmtsim.encode(X.to_sparse(), "e4m3"), "sparse_coo", "dense", "x.to_dense()"),
    "a block that does not divide": (
        lambda: fmtsim.quantize(X, "e4m3", block_size=24),
        "block_size=24",
        "choose 16 or 32",
        "pad=True",
    ),
    "a bool for a block": (
        lambda: fmtsim.quantize(X, "e4m3", block_size=True),
        "True",
        "int of 1 or more",
        "(outer, inner)",
    ),
    "a dim out of range": (lambda: fmtsim.quantize(X, "mxfp4", dim=2), "dim=2", "(6, 64)", "choose -2 to 1"),
    "a rounding that does not exist": (
        lambda: fmtsim.quantize(X, "e4m3", rounding="nearst"),
        "'nearst'",
        "did you mean",
        "choose one of",
    ),
    "too many random bits": (
        lambda: fmtsim.quantize(X, "e4m3", rounding="stochastic", random_bits=40),
        "random_bits=40",
        "1 to 32",
        "None",
    ),
    "random words of another dtype": (
        lambda: fmtsim.quantize(X, "e4m3", rounding="stochastic", random_words=X),
        "float32",
        "int64",
        "pass int64 (6, 64)",
    ),
    "words without stochastic rounding": (
        lambda: fmtsim.quantize(X, "e4m3", random_words=X.long()),
        "random_words",
        "'stochastic'",
        "leave them out",
    ),
    "a string as a flag": (
        lambda: fmtsim.quantize(X, "mxfp4", pad="no"),
        "pad='no'",
        "not a flag",
        "pass True or False",
    ),
    "out= of a tensor with a gradient": (
        lambda: fmtsim.quantize(X.clone().requires_grad_(), "e4m3", out=X.clone()),
        "out=",
        "autograd",
        "torch.no_grad()",
    ),
    "out= that overlaps itself": (
        lambda: fmtsim.quantize(X, "e4m3", out=torch.zeros(6, 1).expand(6, 64)),
        "(1, 0)",
        "one place",
        "out.contiguous()",
    ),
    "out= of another shape": (lambda: fmtsim.quantize(X, "e4m3", out=A), "(4, 8)", "(6, 64)", "torch.empty_like(x)"),
    "codes without their format": (lambda: fmtsim.decode(X.to(torch.uint8)), "does not say", "format=", "'e4m3'"),
    "codes beyond the format": (lambda: fmtsim.decode(torch.tensor([16]), "e2m1"), "code 16", "e2m1", "0 to 15"),
    "codes of a block format": (lambda: fmtsim.decode(X.to(torch.uint8), "mxfp4"), "mxfp4", "needs scales", "encode"),
    "a file that is not there": (
        lambda: fmtsim.Encoded.load("no/such.safetensors"),
        "no/such",
        "cannot read",
        "No such",
    ),
    "a tensor without numbers": (
        lambda: fmtsim.compare(X.to("meta"), X),
        "on meta",
        "no numbers",
        "pass a tensor on a device",
    ),
    "matrices that do not fit": (lambda: fmtsim.mm(A, A, **UNIT), "(4, 8)", "[..., K, N]", "transpose one"),
    "stacks for mm": (lambda: fmtsim.mm(A[None], B[None], **UNIT), "(1, 4, 8)", "[M, K] and [K, N]", "fmtsim.bmm"),
    "two devices": (
        lambda: fmtsim.mm(A, B.to("meta"), **UNIT),
        "a is on cpu, b on meta",
        "one device",
        "b.to(a.device)",
    ),
    "no target": (lambda: fmtsim.mm(A, B), "mm needs target=", "a GPU with its library", "'h200'"),
    "a target that does not exist": (
        lambda: fmtsim.mm(A, B, target="h300"),
        "'h300'",
        "did you mean 'h200'",
        "choose a GPU with its library",
    ),
    "a unit that does not exist": (
        lambda: fmtsim.mm(A, B, target="hoper.wgmma"),
        "hoper",
        "'hopper.wgmma'",
        "a matrix unit alone",
    ),
    "an option that does not exist": (
        lambda: fmtsim.bmm(A[None], B[None], acumulate="fp32", **UNIT),
        "'acumulate'",
        "has no argument",
        "accumulate",
    ),
    "two dtypes on a target": (
        lambda: fmtsim.mm(A, B.double(), target="h200"),
        "float32, b torch.float64",
        "equal dtypes",
        "cast one",
    ),
    "float32 on a unit for TF32": (
        lambda: fmtsim.mm(A, B, **UNIT),
        "multiplies TF32, not float32",
        "'fp32_fma'",
        "allow_tf32=True",
    ),
    "scales of no kind": (
        lambda: fmtsim.scaled_mm(FP8, FP8.t(), torch.ones(3), ONE, out_dtype=torch.bfloat16, **UNIT),
        "(3,)",
        "pass one element each",
        "scale_recipe_a=",
    ),
    "a recipe that does not exist": (
        lambda: fmtsim.convert(model(), "te_curent"),
        "te_curent",
        "'te_current'",
        "has the names",
    ),
    "no model": (lambda: fmtsim.convert([nn.Linear(2, 2)], "te_current"), "list", "torch.nn.Module", "takes"),
    "a filter of one argument": (
        lambda: fmtsim.convert(model(), "te_current", filter_fn=lambda module: True),
        "filter_fn=",
        "a module and its name",
        "write filter_fn=lambda module, name",
    ),
    "a model that is not converted": (
        lambda: fmtsim.revert(model()),
        "Sequential",
        "no converted module",
        "convert it first",
    ),
    "a state of another model": (
        lambda: fmtsim.load_recipe_state(fmtsim.convert(model(), "te_delayed"), other_state()),
        "layer '2'",
        "none of it",
        "convert alike",
    ),
    "a scheme that does not exist": (
        lambda: fmtsim.optim.AdamW(model().parameters(), state="ao_8bits"),
        "'ao_8bits'",
        "did you mean 'ao_8bit'",
        "choose one",
    ),
    "a learning rate below zero": (
        lambda: fmtsim.optim.AdamW(model().parameters(), lr=-1.0),
        "lr=-1.0",
        "is not allowed",
        "a number of 0 or more",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_what_is_allowed_and_what_to_do(mistake):
    call, *words = MISTAKES[mistake]
    with pytest.raises(FmtsimError) as caught, warnings.catch_warnings(action="ignore"):
        call()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert len(message) < 800 and "\n" not in message


def test_they_are_forty():
    assert len(MISTAKES) >= 40
