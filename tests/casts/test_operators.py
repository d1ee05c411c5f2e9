# SPDX-License-Identifier: Apache-2.0
"""The operators alone: torch's rules for them, and what may go around torch's dispatcher."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fmtsim
from fmtsim import quantize, quantize_
from fmtsim.casts.ops import encode as encode_parts
from fmtsim.formats.element import FloatFormat
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.support import dispatch
from fmtsim.support.dispatch import is_plain
from tests.support.bits import assert_same_bits
from tests.support.operands import normal
from tests.support.refusals import refused

KEY = torch.tensor([3, 0])


def spec(name, mode="nearest_even", **options):
    fmt = fmtsim.get_format(name)
    rounding = fmtsim.Rounding(mode=mode, **options)
    return CastSpec(format=fmt, rounding=rounding, overflow=fmt.default_overflow)


OPCHECKS = {
    "nearest": ("quantize", lambda x: (x, spec("e4m3").to_json(), torch.bfloat16)),
    "stochastic": ("quantize", lambda x: (x, spec("nvfp4", "stochastic").to_json(), torch.float32, KEY)),
    "words": ("quantize", lambda x: (x, spec("e4m3", "stochastic", random_bits=1).to_json(), torch.float32, None,
                                     torch.ones(x.shape, dtype=torch.int64))),
    "grad": ("quantize", lambda x: (x.clone().requires_grad_(), spec("mxfp4").to_json(), torch.float32)),
    "transposed": ("quantize", lambda x: (x.T.contiguous().T, spec("mxfp4").to_json(), torch.float32)),
    "encode": ("encode", lambda x: (x, spec("e4m3", "stochastic").to_json(), KEY)),
    "encode blocks": ("encode", lambda x: (x, spec("nvfp4").to_json())),
    "encode zero points": ("encode", lambda x: (x, spec("uint4_g32_zp").to_json())),
    "encode tiles": ("encode", lambda x: (x, spec("logfmt8").to_json())),
}  # fmt: skip


@pytest.mark.parametrize("case", OPCHECKS)
def test_operators_keep_torchs_rules(case):
    name, arguments = OPCHECKS[case]
    given = arguments(normal(4, 128))
    keyed = any(value is KEY for value in given)
    torch.library.opcheck(getattr(getattr(torch.ops.fmtsim, name), "keyed" if keyed else "default"), given)


KEYED = ("quantize", "encode", "gemm", "quantize_operand", "quantize_both", "unrotate")


def test_no_cuda_graph_holds_a_key():
    """A key lies on the CPU: a graph would draw the words of its recording in every replay."""
    unsafe = torch.Tag.cudagraph_unsafe
    for name in KEYED:
        operator = getattr(torch.ops.fmtsim, name)
        assert unsafe in operator.keyed.tags and unsafe not in operator.default.tags


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch 2.11's, of its own first recording
@pytest.mark.parametrize("generator", [3, None])
def test_replayed_casts_draw_anew_gpu(generator):
    if not fmtsim.cuda.available():
        pytest.skip("needs a GPU")
    torch._dynamo.reset()
    run = torch.compile(
        lambda x: quantize(x * 1.0, "e4m3", rounding="stochastic", generator=generator) + 0, mode="reduce-overhead"
    )
    x = normal(64, 64).cuda()
    made = [run(x).clone() for _ in range(6)][2:]  # the first ones record the graph
    assert all(torch.equal(made[0], other) == (generator is not None) for other in made[1:])


@pytest.mark.parametrize("name", ["e4m3", "nvfp4", "uint4_g32_zp"])
def test_decode_keeps_torchs_rules(name):
    parts = encode_parts(normal(4, 64), spec(name))
    present = [torch.empty(0) if part is None else part for part in parts]
    torch.library.opcheck(torch.ops.fmtsim.decode.default, (*present, spec(name).to_json(), torch.bfloat16))


def test_formats_that_refuse_nan_do_so_everywhere():
    strict = FloatFormat(
        name="strict_e2m1", exponent_bits=2, mantissa_bits=1, nan="none", infinities=False, nan_policy="error"
    )
    good, bad = normal(4, 32), torch.full((4, 32), torch.nan)
    message = "x holds NaN, which strict_e2m1.* lacks and its record forbids; remove NaN or set nan_policy='max'"
    for options in ({}, {"block_size": 32}):
        assert_same_bits(quantize(good, strict, **options), quantize(good, "e2m1", **options), what="good")
        refused(message, quantize, bad, strict, **options)
        refused(message, quantize_, bad, strict, **options)
        refused(message, fmtsim.encode, bad, strict, **options)
        with pytest.raises(fmtsim.errors.ArgumentError, match=message):
            vmap(lambda v, options=options: quantize(v, strict, **options))(bad)
    torch._dynamo.reset()
    traced = torch.compile(lambda x: quantize(x, strict), fullgraph=True, backend="aot_eager")
    assert_same_bits(traced(good), quantize(good, "e2m1"), what="traced")
    refused(message, traced, bad)


def test_engines_see_no_history():
    """An operator called outside of the verbs, with tensors that require gradients."""
    x = normal(4, 64).requires_grad_()
    y = torch.ops.fmtsim.quantize(x, spec("e4m3").to_json(), torch.float32)
    y.sum().backward()
    assert_same_bits(x.grad, torch.ones(4, 64), what="grad")
    assert isinstance(encode_parts(x, spec("nvfp4")), EncodedParts)


pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own use of it


class Subclass(torch.Tensor):
    pass


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_gradients_subclasses_and_lazy_bits_are_not():
    x = torch.ones(4)
    assert not is_plain(x.clone().requires_grad_())
    assert not is_plain(x.as_subclass(Subclass))
    assert not is_plain(torch.ones(4, dtype=torch.complex64).conj().imag)  # negative, but its memory is not
    with forward_ad.dual_level():
        assert not is_plain(forward_ad.make_dual(x, x))


def test_nothing_is_plain_under_modes_and_transforms():
    x = torch.ones(4)
    seen = []

    def ask(y):
        seen.append(is_plain(x) or is_plain(y))
        return y + 1

    for mode in (Names(), Functions(), torch.device("cpu")):
        with mode:
            ask(x)
    torch.vmap(ask)(x)
    torch.func.grad(lambda y: ask(y).sum())(x)
    torch.func.jvp(ask, (x,), (x,))
    torch.func.functionalize(ask)(x)
    make_fx(ask)(x)
    make_fx(ask, tracing_mode="fake")(x)
    torch.jit.trace(ask, x, check_trace=False)
    with torch._subclasses.FakeTensorMode():
        ask(torch.ones(4))
    assert len(seen) == 11 and not any(seen)
    assert is_plain(x)  # every one of them has left the thread as it was


def test_modes_see_the_operator():
    x = torch.tensor([1.3, 500.0])
    with Names() as names:
        fmtsim.quantize(x, "e4m3")
    assert "fmtsim.quantize.default" in names.seen
    with Functions() as functions:
        fmtsim.quantize(x, "e4m3")
    assert "fmtsim.quantize.default" in functions.seen or "fmtsim.quantize" in functions.seen


def test_without_what_torch_may_lack_every_call_takes_the_dispatcher(monkeypatch):
    x = normal(100)
    direct = fmtsim.quantize(x, "e4m3"), fmtsim.encode(x, "e4m3").decode()
    monkeypatch.setattr(dispatch, "_tensors", frozenset())
    assert not is_plain(x)
    assert torch.equal(direct[0], fmtsim.quantize(x, "e4m3"))
    assert torch.equal(direct[1], fmtsim.encode(x, "e4m3").decode())
