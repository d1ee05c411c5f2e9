# SPDX-License-Identifier: Apache-2.0
"""torch's products of a tensor with a matrix have the bits of converted layers with that matrix."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fmtsim.nn import convert, revert
from fmtsim.nn.operations import MEANINGS, PRODUCTS, ModelMode
from fmtsim.recipes import get_recipe
from tests.support.bits import all_same_bits
from tests.support.models import MatrixLayers, Written, train
from tests.support.operands import normal

CURRENT = get_recipe("te_current").linear

# How a product with w [32, 16] (the first of the pair), [16, 32] or a stack [3, 32, 16] is written, x being [3, 8, 16].
SINGLE = {
    "linear": lambda x, w: F.linear(x, w),
    "named": lambda x, w: F.linear(input=x, weight=w),
    "operator": lambda x, w: x @ w.T,
    "view": lambda x, w: torch.matmul(x, w.view(4, 8, 16).reshape(32, 16).transpose(0, 1)),
    "method": lambda x, w: x.matmul(w.mT.contiguous()),
    "cast": lambda x, w: F.linear(x.float(), w.to(torch.float64).float()),
    "mm": lambda x, w: torch.mm(x.flatten(0, 1), w.t()).unflatten(0, (3, 8)),
    "addmm": lambda x, w: torch.addmm(torch.zeros(32), x.flatten(0, 1), w.t()).unflatten(0, (3, 8)),
    "left": lambda x, w: (w @ x.mT).mT,
    "linear left": lambda x, w: F.linear(w, x.flatten(0, 1)).mT.unflatten(0, (3, 8)),
    "einsum": lambda x, w: torch.einsum("bti,oi->bto", x, w),
    "dots": lambda x, w: torch.einsum("...i,oi->...o", x, w),
    "heads": lambda x, w: torch.einsum("bti,hdi->bthd", x, w.view(4, 8, 16)).flatten(2),
    "inner": lambda x, w: torch.einsum("btgj,ogj->bto", x.unflatten(-1, (2, 8)), w.unflatten(-1, (2, 8))),
    "broadcast": lambda x, w: torch.matmul(x, w.mT[None]),
    "gathered": lambda x, w: F.linear(x, w[torch.arange(32)]),
    "by name": lambda x, w: torch.addmm(input=torch.zeros(32), mat2=w.T, mat1=x.flatten(0, 1)).unflatten(0, (3, 8)),
    "some by name": lambda x, w: torch.matmul(x, other=w.T),
}
STACK = {
    "loop": lambda x, w: torch.stack([F.linear(x[e], w[e]) for e in range(3)]),
    "tensor index": lambda x, w: torch.stack([F.linear(x[e], w[e]) for e in torch.arange(3)]),
    "iterated": lambda x, w: torch.stack([x[e] @ each.T for e, each in enumerate(w)]),
    "unbound": lambda x, w: torch.stack([x[e] @ each.T for e, each in enumerate(w.unbind())]),
    "bmm": lambda x, w: torch.bmm(x, w.transpose(1, 2)),
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(1), x, w.mT, alpha=1),
    "by name": lambda x, w: torch.zeros(1).baddbmm(batch1=x, batch2=w.mT, beta=1, alpha=1),
    "matmul": lambda x, w: x @ w.mT,
    "left": lambda x, w: (w @ x.mT).mT,
    "einsum": lambda x, w: torch.einsum("eti,eoi->eto", x, w),
    "gathered": lambda x, w: torch.bmm(x, w[torch.tensor([0, 1, 2])].mT),
    "grouped": lambda x, w: torch._grouped_mm(
        x.flatten(0, 1), w.mT, offs=torch.tensor([8, 16, 24], dtype=torch.int32)
    ).unflatten(0, (3, 8)),
    "grouped stack": lambda x, w: F.grouped_mm(x, w.mT),
}


@pytest.mark.parametrize("how", SINGLE)
def test_a_matrix(how):
    w, x = normal(32, 16, seed=1), normal(3, 8, 16)
    layer = nn.Linear(16, 32, bias=False)
    layer.weight.data = w.clone()
    expected = train(convert(layer, "te_delayed"), x)
    found = train(convert(Written(SINGLE[how], w), "te_delayed"), x)
    assert all_same_bits(expected, found)
    assert not torch.equal(found[0], SINGLE[how](x, w))
    model = convert(Written(lambda x, w: SINGLE[how](x, w).add_(1), w), "te_current")  # models write into results
    model(x).sum().backward()


def test_sums_beside_a_product():
    w, x, c = normal(32, 16, seed=1), normal(8, 16), normal(8, 32, seed=2)
    layer = nn.Linear(16, 32, bias=False)
    layer.weight.data = w.clone()
    y = convert(layer, recipe=CURRENT)(x)
    for how, expected in (
        (lambda x, w: torch.addmm(c, x, w.T, beta=3, alpha=2), 2 * y + 3 * c),
        (lambda x, w: F.linear(w, x, c[:, 0]).T, (y.T + c[:, 0]).T),
        (lambda x, w: torch.baddbmm(c[None], x[None], w.T[None]).squeeze(0), y + c),
        (lambda x, w: F.grouped_mm(x, w.T[None], offs=torch.tensor([8], dtype=torch.int32)), y),
        (lambda x, w: torch._grouped_mm(x, w.T[None], offs=torch.tensor([6], dtype=torch.int32))[:6],
         convert(copy.deepcopy(revert(layer)), recipe=CURRENT)(x[:6])),
    ):  # fmt: skip
        assert torch.equal(convert(Written(how, w), recipe=CURRENT)(x), expected)
    biased = nn.Linear(16, 32)
    written = convert(Written(lambda x, w: F.linear(x, w, biased.bias), biased.weight.detach().clone()), recipe=CURRENT)
    addmm = convert(
        Written(lambda x, w: torch.addmm(biased.bias, x, w.T), biased.weight.detach().clone()), recipe=CURRENT
    )
    assert torch.equal(written(x), convert(biased, recipe=CURRENT)(x)) and torch.equal(addmm(x), biased(x))


def test_arguments_that_no_rule_takes_are_left_to_torch():
    for how in (lambda x, w: torch.mm(x, w.T, torch.float32), lambda x, w: torch.mm(x, w.T, out_dtype=torch.float32)):
        with pytest.raises(NotImplementedError, match="aten::mm.dtype"):  # a CPU has none
            convert(Written(how, normal(32, 16, seed=1)), recipe=CURRENT)(normal(8, 16))


@pytest.mark.parametrize("how", STACK)
def test_a_stack_of_matrices(how):
    w, x = normal(3, 32, 16, seed=1), normal(3, 8, 16)
    y, dx, *dw = train(convert(MatrixLayers(w), recipe=CURRENT), x)
    found = train(convert(Written(STACK[how], w), recipe=CURRENT), x)
    assert all_same_bits([y, dx, torch.stack(dw)], found)


class Seen(ModelMode):
    """Note the meaning of each function, and replace activations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def run(self, func, args, kwargs):
        self.names.append(MEANINGS.get(func, "other"))
        return super().run(func, args, kwargs)

    def activation(self, func, input, **how):
        return func(input, **how) + 1


def test_a_mode_is_asked_what_a_function_means():
    functions = [func for row in PRODUCTS for func in row.functions]
    assert len(functions) == len(set(functions)) and {MEANINGS[f] for f in functions} == {"product", "other_product"}
    assert all(hasattr(ModelMode, meaning) for meaning in {*MEANINGS.values(), "other"})
    x = normal(4, 4)
    with Seen() as outer, Seen() as inner:
        y = F.relu(F.linear(x, x).unflatten(0, (2, 2)).mT) * x.view(2, 2, 4).mT.exp()
    assert inner.names == ["product", "view", "view", "activation", "view", "view", "other", "multiply"]
    assert outer.names == [*inner.names[:4], "add", *inner.names[4:]]  # it sees what the inner one calls
    assert torch.equal(y, (F.relu((x @ x.T).view(2, 2, 4).mT) + 2) * x.view(2, 2, 4).mT.exp())
