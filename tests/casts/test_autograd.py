# SPDX-License-Identifier: Apache-2.0
"""quantize under torch's transformations: autograd, torch.func, torch.compile, torch.export; the operators alone."""

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

import fmtsim
from fmtsim import quantize, quantize_
from tests.support.bits import assert_same_bits, same_bits
from tests.support.operands import normal

# torch itself still meets its deprecated scripting when forward-mode derivatives are first used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("one_thread"),
]

NAMES = ["e4m3", "nf4", "mxfp4", "nvfp4", "logfmt8"]
STOCHASTIC = {"rounding": "stochastic", "generator": 5}
TO_ODD, E5M2 = fmtsim.Rounding(mode="to_odd"), fmtsim.get_format("e5m2")


# Straight-through gradients.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_passes_straight_through(name, dtype):
    """Everywhere: also at saturated, flushed and special elements, and back into x's own dtype."""
    x = normal(4, 128, dtype=dtype)
    x[0, :4] = torch.tensor([1e30, 1e-30, torch.inf, torch.nan])
    x.requires_grad_()
    y = quantize(x, name, **STOCHASTIC)
    upstream = normal(4, 128, seed=1).to(y.dtype)
    y.backward(upstream)
    assert y.requires_grad and x.grad is not None and x.grad.dtype == dtype
    assert_same_bits(x.grad, upstream.to(dtype), what=name)


def test_gradients_through_strides_and_out_dtype():
    x = normal(8, 6).requires_grad_()
    y = quantize(x.T[::2], "e4m3", out_dtype=torch.float64)
    y.backward(torch.full_like(y, 3.0))
    expected = torch.zeros(8, 6)
    expected[:, ::2] = 3.0
    assert_same_bits(x.grad, expected, what="x.grad")


def test_second_derivatives_are_those_of_the_identity():
    x = normal(4, 32).requires_grad_()
    (first,) = torch.autograd.grad((quantize(x, "e4m3") ** 2).sum(), x, create_graph=True)
    assert_same_bits(first.detach(), 2 * quantize(x.detach(), "e4m3"), what="first")
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_same_bits(second, torch.full((4, 32), 2.0), what="second")
    (first,) = torch.autograd.grad(quantize(x, "mxfp4").sum(), x, create_graph=True)
    assert not first.requires_grad  # the identity has no curvature


def test_no_graph_where_none_is_wanted():
    x = normal(4, 32).requires_grad_()
    with torch.no_grad():
        assert not quantize(x, "e4m3").requires_grad
        version = x._version
        assert quantize_(x, "e4m3") is x and x.requires_grad and x._version == version + 1
    assert not quantize(x.detach(), "e4m3").requires_grad
    assert quantize(x, "e4m3").is_leaf is False


@pytest.mark.parametrize("name", ["e4m3", "mxfp4", "logfmt8"])
def test_autograd_notices_what_out_overwrote(name):
    """A tensor saved for a backward and then written by out= must not give a gradient of the new values."""
    kept, w = normal(4, 128), normal(4, 128, seed=1).requires_grad_()
    loss = (kept * w).sum()
    quantize_(kept, name)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", NAMES)
def test_inference_mode(name):
    x = normal(4, 128)
    expected = quantize(x, name)
    with torch.inference_mode():
        y, out = quantize(x, name), torch.empty(4, 128)
        quantize(x, name, out=out)
        assert y.is_inference() and quantize_(out.clone(), name).is_inference()
        assert_same_bits(y, expected, what=name)
        assert_same_bits(out, expected, what=name)
        assert_same_bits(fmtsim.encode(x, name).decode(), expected, what=name)
    assert_same_bits(quantize(y, "fp32"), expected, what="an inference tensor outside")


def test_autocast_changes_nothing():
    x = normal(4, 64).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name in NAMES:
            y = quantize(x, name, pad=True)
            assert y.dtype == torch.float32
            assert_same_bits(y.detach(), quantize(x.detach(), name, pad=True), what=name)


def test_checkpoints_repeat_their_random_words():
    from torch.utils.checkpoint import checkpoint

    def layer(v):
        noisy = quantize(v, "e2m1", rounding="stochastic")
        return (noisy * noisy.detach()).sum()

    grads = []
    for wrapped in (layer, lambda v: checkpoint(layer, v, use_reentrant=False)):
        x = normal(4, 64).requires_grad_()
        torch.manual_seed(3)
        wrapped(x).backward()
        grads.append(x.grad)
    assert_same_bits(grads[1], grads[0], what="checkpoint")


# torch.func.


@pytest.mark.parametrize("name", NAMES)
def test_vmap_quantises_each_tensor_by_itself(name):
    x = normal(3, 4, 128)
    rows = torch.stack([quantize(row, name) for row in x])
    assert_same_bits(vmap(lambda v: quantize(v, name))(x), rows, what="rows")
    assert_same_bits(
        vmap(lambda v: quantize(v, name), in_dims=1, out_dims=1)(x.transpose(0, 1)),
        rows.transpose(0, 1),
        what="columns",
    )
    assert_same_bits(
        vmap(vmap(lambda v: quantize(v, name)))(x),
        torch.stack([torch.stack([quantize(v, name) for v in row]) for row in x]),
        what="nested",
    )
    empty = vmap(lambda v: quantize(v, name))(x[:0].bfloat16())
    assert empty.shape == (0, 4, 128) and empty.dtype == quantize(x[0].bfloat16(), name).dtype
    half = vmap(lambda v: quantize(v, name, dim=0, pad=True))(x.half())
    assert_same_bits(half, torch.stack([quantize(row, name, dim=0, pad=True) for row in x.half()]), what="dim 0")


def test_random_words_under_vmap():
    x = torch.full((3, 64), 0.3)

    def noisy(v, **options):
        return quantize(v, "e4m3", rounding="stochastic", **options)

    fixed = vmap(lambda v: noisy(v, generator=7))(x)
    assert_same_bits(
        fixed, torch.stack([noisy(row, generator=7) for row in x]), what="an int seed gives each tensor its words"
    )
    same = vmap(noisy, randomness="same")(x)
    assert_same_bits(same[0], same[1])
    different = vmap(noisy, randomness="different")(x)
    assert not same_bits(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(noisy)(x)
    words = torch.randint(0, 8, (3, 64))
    given = vmap(lambda v, w: noisy(v, random_words=w, random_bits=3))(x, words)
    assert_same_bits(given, noisy(x, random_words=words, random_bits=3), what="words")
    one = vmap(lambda w: noisy(x[0], random_words=w, random_bits=3))(words)
    assert_same_bits(one, given, what="words alone")
    with pytest.raises(fmtsim.errors.ArgumentError, match="random_words reach from 0 to 7"):
        vmap(lambda v, w: noisy(v, random_words=w, random_bits=2))(
            x, words.clamp(min=0).where(words > 0, 7 * (words < 0))
        )


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_torch_func(name):
    x, tangent = normal(128), normal(128, seed=1)

    def loss(v):
        return (quantize(v, name) ** 2).sum()

    y = quantize(x, name)
    assert_same_bits(grad(loss)(x), 2 * y, what="grad")
    value, derivative = jvp(lambda v: quantize(v, name), (x,), (tangent,))
    assert_same_bits(value, y, what="jvp")
    assert_same_bits(derivative, tangent, what="jvp")
    _, pull = vjp(lambda v: quantize(v, name), x)
    assert_same_bits(pull(tangent)[0], tangent, what="vjp")
    assert_same_bits(vmap(grad(loss))(x.repeat(2, 1)), (2 * y).repeat(2, 1), what="vmap of grad")


# torch.compile and torch.export.


class Quantised(torch.nn.Module):
    """A linear layer with quantised operands."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(normal(8, 32, seed=9))

    def forward(self, x):
        return quantize(x, "mxfp4") @ quantize(self.weight, "e4m3").T


def compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


TRACED = {
    "scalar": lambda x: quantize(x, "e4m3") * 2,
    "record": lambda x: quantize(x, E5M2, rounding=TO_ODD),
    "block": lambda x: quantize(x, "nvfp4"),
    "own block": lambda x: quantize(x, "e4m3", block_size=(2, 16), scale_rule="floor", dim=0, pad=True),
    "transposed": lambda x: quantize(x.T, "mxfp4", pad=True),
    "stochastic": lambda x: quantize(x, "e4m3", **STOCHASTIC),
    "key": lambda x: quantize(x, "mxfp4", rounding="stochastic", random_bits=8, generator=fmtsim.RandomKey(1, 2)),
    "words": lambda x: quantize(x, "e4m3", rounding="stochastic", random_bits=1, random_words=(x > 0).long()),
    "out": lambda x: quantize(x, "e4m3", out=torch.empty_like(x, dtype=torch.bfloat16)),
    "in place": lambda x: quantize_(x + 1, "mxfp4"),
    "torch dtype": lambda x: quantize(x, torch.float8_e4m3fn, out_dtype=torch.float16),
    "vmap": lambda x: vmap(lambda v: quantize(v, "mxfp4"))(x),
}


@pytest.mark.parametrize("case", TRACED)
def test_compiled_results_have_the_bits_of_eager_ones(case):
    x = normal(4, 64)
    assert_same_bits(compiled(TRACED[case])(x), TRACED[case](x), what=case)


@pytest.mark.slow
def test_inductor():
    x = normal(4, 64)
    for case in ("block", "stochastic"):
        assert_same_bits(compiled(TRACED[case], backend="inductor")(x), TRACED[case](x), what=case)


def test_compiled_gradients():
    def loss(v):
        return (quantize(v, "e4m3") ** 2 + quantize(v, "nvfp4", **STOCHASTIC)).sum()

    x, traced = normal(4, 64).requires_grad_(), normal(4, 64).requires_grad_()
    loss(x).backward()
    compiled(loss)(traced).backward()
    assert_same_bits(traced.grad, x.grad, what="grad")


def test_compiled_once_for_many_shapes():
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    traced = compiled(lambda x: quantize(x, "mxfp4"), backend=count, dynamic=True)
    for shape in ((3, 64), (5, 64), (2, 96), (9, 32)):
        x = normal(*shape)
        assert_same_bits(traced(x), quantize(x, "mxfp4"), what=str(shape))
    assert count.frame_count == 1


def test_writing_into_arguments_of_a_compiled_function():
    x, out = normal(4, 64), torch.zeros(4, 64)
    expected = quantize(x, "e4m3")
    compiled(lambda x, out: quantize(x, "e4m3", out=out))(x, out)
    assert_same_bits(out, expected, what="out")
    compiled(lambda x: quantize_(x, "e4m3"))(x)
    assert_same_bits(x, expected, what="in place")


def test_default_randomness_of_a_compiled_function():
    x = torch.full((1000,), 0.3)
    traced = compiled(lambda x: quantize(x, "e4m3", rounding="stochastic"))
    first, second = traced(x), traced(x)
    assert not same_bits(first, second)
    assert first.unique().tolist() == quantize(x, "e4m3", rounding="stochastic").unique().tolist()


def test_errors_of_a_compiled_function_name_their_reason():
    x = normal(4, 63)
    with pytest.raises(Exception, match="block_size=32 does not divide 63"):
        compiled(lambda x: quantize(x, "mxfp4"))(x)
    with pytest.raises(Exception, match="unknown format 'e4m4x'; did you mean"):
        compiled(lambda x: quantize(x, "e4m4x"))(x)
    words = torch.full((4, 63), 2)
    with pytest.raises(fmtsim.errors.ArgumentError, match="random_words reach from 2 to 2"):
        compiled(lambda x, w: quantize(x, "e4m3", rounding="stochastic", random_bits=1, random_words=w))(x, words)


def test_exported_modules_compute_and_train():
    layer, x = Quantised(), normal(3, 32)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    exported = program.module()
    for batch in (3, 7):
        assert_same_bits(exported(normal(batch, 32)).detach(), layer(normal(batch, 32)).detach(), what="export")
    layer(x).sum().backward()
    exported(x).sum().backward()
    assert_same_bits(dict(exported.named_parameters())["weight"].grad, layer.weight.grad, what="weight")
