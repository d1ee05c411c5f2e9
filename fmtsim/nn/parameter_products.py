# SPDX-License-Identifier: Apache-2.0
"""Emulate the products that a model writes itself, wherever one side is a Parameter or a view of one.

While the forward of a module that writes products runs, a torch function mode follows its Parameters through views,
copies and casts, and gives each product with one to the ``ParameterProduct`` of that Parameter, or to the converted
layer that it belongs to. Of a stack of matrices ``[experts, N, K]`` each is a product, and all share one memory of
delayed scales.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.gemm.layers.keys import Generator
from fmtsim.nn.attention import multi_head
from fmtsim.nn.contractions import Multiply, einsum, grouped, linear, matmul, named, reflected, with_sum
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.own_products import Own, names_groups, writers
from fmtsim.nn.wrapped import unwrap, wrap
from fmtsim.recipes.plan import LayerPlan
from fmtsim.scaling.repeats import repeat_under
from fmtsim.support.dispatch import OwnMode

PRODUCTS: Final = "fmtsim_products"  # the submodule with what multiplies a module's own Parameters, by their names
READS: Final = "_fmtsim_reads"  # on each module that writes products: owners and names of Parameters
FORWARD: Final = "_fmtsim_forward"  # beside it: a forward that the instance had of its own, or None


class ParameterProduct(EmulatedModule):
    """Multiply by one Parameter of a module that is not converted, where that module's model writes the product.

    It holds the quantisers and their memory; the Parameter stays its owner's.
    """

    owner: nn.Module
    parameter: str

    def __init__(self, owner: nn.Module, parameter: str) -> None:
        super().__init__()
        self.__dict__.update(owner=owner, parameter=parameter)  # the owner is not a submodule
        self.seen = False  # whether a product was
        self.shape: tuple[int, int] | None = None  # of its matrix as [N, K], once it is seen
        self.left: tuple[str, ...] = ()  # functions that read the Parameter and are not emulated

    @property
    def weight(self) -> nn.Parameter:
        """The Parameter."""
        return getattr(self.owner, self.parameter)  # type: ignore[no-any-return]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the Parameter, which is the owner's in its model; without ``recurse`` nothing, as FSDP1 asks."""
        if recurse:
            yield f"{prefix}.{self.parameter}" if prefix else self.parameter, self.weight

    @staticmethod
    def matrices(module: Any) -> Iterator[tuple[int, int]]:
        """Yield the size of the matrix as it was multiplied last, or as it is stored."""
        yield module.shape or module.weight.shape[-2:]

    def gemm(self, x: Tensor, w: Tensor, bias: Tensor | None, part: str = "") -> Tensor:
        """Return ``x w^T + bias``."""
        if not self.seen and not torch.compiler.is_compiling():
            self.seen, self.shape = True, (w.shape[0], w.shape[1])
        return super().gemm(x, w, bias, part)

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the matrix, or with the first of a stack: what ``explain_mm`` looks at."""
        w = self.weight.detach()
        w = w if w.dim() == 2 else w[0]
        w = w if self.shape in (None, tuple(w.shape)) else w.t()
        return self.gemm(input, w.requires_grad_(), None)

    def extra_repr(self) -> str:
        """Show the Parameter before the formats."""
        return f"{self.parameter} {list(self.weight.shape)}, {self._runs}" if self.emulation else ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as any module."""
        return nn.Module.__reduce_ex__(self, protocol)


class ParameterMode(OwnMode):
    """Emulate every product inside a ``with`` that has one of some Parameters on one side.

    Args:
        module: The module that reads them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._known: dict[Tensor, Multiply] = {}
        for owner, name in module.__dict__[READS]:
            multiplies = owner if isinstance(owner, EmulatedModule) else owner._modules[PRODUCTS][name]
            self._known[getattr(owner, name)] = partial(_gemm, multiplies)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace products; follow views."""
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.unflatten:  # torch.compile cannot trace this method under a mode around this one
            func = torch.unflatten
        if func in _MULTIPLIES:
            y = self.multiplied(func, args, kwargs)
            if y is not None:
                return y
            self.leave(func, args, kwargs)
        elif func in _UNKNOWN:
            self.leave(func, args, kwargs)
        elif func is F.multi_head_attention_forward:  # torch runs it as a whole, without asking about what it calls
            with self:
                return _MULTI_HEAD(*args, **kwargs)
        y = func(*args, **kwargs)
        if (func is torch.unflatten or func in _VIEWS) and (found := self.find(args[0])) is not None:
            for view in (y,) if isinstance(y, Tensor) else y:
                self._known[view] = found
        return y

    def multiplied(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return a product, emulated where one side is one of the Parameters; None leaves it to torch."""
        y = product(func, self.find, args, kwargs)
        if y is not None and not torch.compiler.is_compiling():
            repeat_under(self._module, partial(ParameterMode, self._module))
        return y

    def find(self, t: Any) -> Multiply | None:
        """Return what multiplies by a tensor, None where that is not a Parameter that the module reads."""
        if not isinstance(t, Tensor):
            return None
        found = self._known.get(t)
        return found if found is not None or t._base is None else self._known.get(t._base)

    def leave(self, func: Any, args: Any, kwargs: Any) -> None:
        """Remember what is not emulated, for the report."""
        if torch.compiler.is_compiling():
            return
        for t in (*args, *kwargs.values()):
            found = self.find(t)
            module = None if found is None else found.args[0]  # type: ignore[attr-defined]
            if isinstance(module, ParameterProduct) and func.__name__ not in module.left:
                module.left = (*module.left, func.__name__)


def _gemm(module: EmulatedModule, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return module.gemm(x, w, bias, module.parts[0])


_MULTI_HEAD: Final = multi_head()
_RULES: Final = (
    ("matmul", named(matmul, "input", "other")),
    ("mm", named(matmul, "input", "mat2")),
    ("bmm", named(matmul, "input", "mat2")),
    ("mv", named(matmul, "input", "vec")),
    ("addmm", named(with_sum, "input", "mat1", "mat2")),
    ("baddbmm", named(with_sum, "input", "batch1", "batch2")),
)
_MULTIPLIES: Final[dict[Any, Callable[..., Tensor | None]]] = {
    F.linear: named(linear, "input", "weight", "bias"), torch.einsum: einsum, torch.Tensor.__rmatmul__: reflected,
    torch._grouped_mm: named(grouped, "input", "mat2", "offs", "bias", "out_dtype"),
    **{getattr(at, name): rule for name, rule in _RULES for at in (torch, Tensor)},
}  # fmt: skip
_UNKNOWN: Final = frozenset(
    {F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
     torch.tensordot, torch.inner, torch.addmv, torch.addbmm, torch.linalg.multi_dot, torch.chain_matmul}
)  # fmt: skip  # products that are not emulated
_FOLLOWED: Final = (
    *("t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "adjoint", "squeeze", "unsqueeze", "flatten"),
    *("view", "view_as", "reshape", "reshape_as", "unflatten", "expand", "expand_as", "select", "narrow", "chunk"),
    *("split", "tensor_split", "unbind", "index_select", "contiguous", "clone", "detach", "cpu", "cuda", "to"),
    *("type", "type_as", "float", "double", "half", "bfloat16", "__getitem__"),
)
_VIEWS: Final = frozenset(
    {getattr(at, name) for name in _FOLLOWED for at in (Tensor, torch) if callable(getattr(at, name, None))}
    | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data")}
)


def product(func: Any, find: Callable[[Any], Multiply | None], args: Any, kwargs: Any) -> Tensor | None:
    """Return a product of torch with what ``find`` finds for one of its sides; None where it finds nothing."""
    return _MULTIPLIES[func](find, *args, **kwargs)


def attach_products(
    model: nn.Module, chosen: list[tuple[str, Own, LayerPlan]], generator: Generator, total_steps: int | None
) -> None:
    """Emulate products with a model's own matrices, and those with weights of converted layers that it writes."""
    for name, own, plan in chosen:
        made = ParameterProduct(own.module, own.parameter)
        made.emulate(name, plan, generator, total_steps)
        own.module.add_module(PRODUCTS, nn.ModuleDict(own_products(own.module) | {own.parameter: made}))
    for module, read in writers(model, [own for _, own, _ in chosen]).items():
        module.__dict__[READS] = read
        wrap(module, FORWARD, _multiplying)


def detach_products(model: nn.Module) -> None:
    """Undo ``attach_products``."""
    for module in model.modules():
        if READS not in module.__dict__:
            continue
        del module.__dict__[READS]
        unwrap(module, FORWARD)
    for module in list(model.modules()):
        module._modules.pop(PRODUCTS, None)


def own_products(module: nn.Module) -> dict[str, ParameterProduct]:
    """Return what multiplies by a module's own Parameters, by their names; empty where nothing does."""
    made: Any = module._modules.get(PRODUCTS)
    return {} if made is None else dict(made.items())


def _multiplying(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with the products that it writes emulated."""
    if READS not in module.__dict__:  # reverted
        return forward(*args, **kwargs)
    if "torch._dynamo" in sys.modules and names_groups(type(module)):  # a compiler does not ask modes about that
        return torch._dynamo.disable(_run)(module, forward, *args, **kwargs)
    return _run(module, forward, *args, **kwargs)


def _run(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    with ParameterMode(module):
        return forward(*args, **kwargs)
