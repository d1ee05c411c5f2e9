"""What may go around torch's dispatcher, and what must not."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fmtsim
from fmtsim import dispatch
from fmtsim.dispatch import is_plain
from tests.support.operands import normal

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


def test_plain_tensors_are_plain():
    x = torch.ones(4)
    assert is_plain(x) and is_plain(x.view(2, 2).T) and is_plain(x.double())
    with torch.no_grad():
        assert is_plain(x) and is_plain(torch.nn.Parameter(x)) and is_plain(x.requires_grad_())
    with torch.inference_mode():
        assert is_plain(torch.ones(4)) and is_plain(x)
    with torch.autocast("cpu"):
        assert is_plain(torch.ones(4))


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
