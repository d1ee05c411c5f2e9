# SPDX-License-Identifier: Apache-2.0
"""Emulate the products that a model writes itself, wherever one side is a Parameter or a view of one.

A forward that says ``F.linear(x, self.weight)``, ``x @ self.experts[e]`` or ``F.linear(h, self.embedding.weight)`` is
recognised before it runs by the names in its code. While it runs, ``RawMatmuls`` follows its Parameters through views,
copies and casts, and gives each product with one to the ``ParameterProduct`` of that Parameter, or to the converted
layer that it belongs to. Of a stack of matrices ``[experts, N, K]`` each is a product, and all share one memory of
delayed scales.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_iter

from fmtsim.gemm.layers.keys import Generator
from fmtsim.nn.conversion import PRODUCTS, wrap
from fmtsim.nn.forward import is_of_torch, names_in_forward
from fmtsim.nn.modules import EmulatedModule, emulated_class
from fmtsim.nn.operations import EMULATED_NAMES, GROUPED_NAMES, RULES, ModelMode, Multiply
from fmtsim.recipes.layer_plan import LayerPlan
from fmtsim.support.dispatch import constant_in_graphs

_VERBS: Final = EMULATED_NAMES | {"multi_head_attention_forward"}
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LISTS: Final = (nn.ParameterList, nn.ParameterDict)  # the module around them multiplies with their Parameters
_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class RawMatrix(NamedTuple):
    """Name a Parameter that a model multiplies with in code of its own.

    Attributes:
        owner: Name of the module that holds it.
        module: The module.
        parameter: The Parameter's name in the module.
        head: Whether it is the weight of an embedding, so that a product with it makes logits.
    """

    owner: str
    module: nn.Module
    parameter: str
    head: bool


def raw_matrices(model: nn.Module) -> dict[str, RawMatrix]:
    """Return the matrices that a model multiplies with in code of its own, by the names that rules see.

    That is the module's name, or where it has several ``module.parameter``.
    """
    modules = dict(model.named_modules())
    embeddings = {id(m.weight) for m in modules.values() if isinstance(m, nn.Embedding)}
    matrices: dict[str, RawMatrix] = {}
    for name, module in modules.items():
        parameters = raw_parameters(module)
        if isinstance(module, _LISTS) and _matrices(module) and _writes(_holder(modules, name)[1]):
            parameters = tuple(_matrices(module))
        elif isinstance(module, nn.Embedding):  # a head that is tied to it multiplies by its weight
            parameters = ("weight",) if any(_reads(above, "weight") for above in _above(modules, name)) else ()
        elif name.endswith("out_proj"):  # attention of a user's class may multiply with out_proj.weight
            around = modules[name.rpartition(".")[0]]
            written = isinstance(around, nn.MultiheadAttention) and raw_parameters(around)
            parameters = ("weight",) if written else parameters
        for parameter in parameters:
            head = id(module._parameters[parameter]) in embeddings
            rule_name = ".".join(filter(None, (name, parameter))) if len(parameters) > 1 else name
            matrices[rule_name] = RawMatrix(name, module, parameter, head)
    return matrices


def raw_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's own matrices, or stacks of them, where its code multiplies with some."""
    cls = type(module)
    if cls.__module__.startswith("torch.") or isinstance(module, (EmulatedModule, nn.Embedding, *_CONTAINERS)):
        return ()
    if emulated_class(cls) is not None or parametrize.is_parametrized(module):
        return ()
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
        return ()
    names = _matrices(module)  # two or three dimensions
    return tuple(names) if names and _writes(module) else ()


def writers(model: nn.Module, owned: list[RawMatrix]) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return the modules whose forward may multiply with Parameters itself, each with owners and names of these.

    Args:
        model: The converted model.
        owned: Those of ``raw_matrices`` that are emulated. Weights of converted layers that other modules read are
            found beside them.
    """
    modules = dict(model.named_modules())
    by_writer: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for matrix in owned:
        at = [matrix.module]  # modules whose code may multiply with the matrix
        if isinstance(matrix.module, _LISTS):
            at = [_holder(modules, matrix.owner)[1]]
        elif isinstance(matrix.module, nn.Embedding):
            at = [above for above in _above(modules, matrix.owner) if _reads(above, "weight")]
        for module in at:
            by_writer.setdefault(module, []).append((matrix.module, matrix.parameter))
    by_module: dict[nn.Module, list[RawMatrix]] = {}
    for matrix in owned:
        by_module.setdefault(matrix.module, []).append(matrix)
    for module in modules.values():
        if isinstance(module, EmulatedModule) or not _writes(module):
            continue
        listed = by_writer.get(module, [])
        for part in module.modules():
            names = [matrix.parameter for matrix in by_module.get(part, ())]
            names += _matrices(part) if isinstance(part, EmulatedModule) and part.emulation is not None else []
            read = [(part, name) for name in names if _reads(module, name) and (part, name) not in listed]
            if read:
                by_writer.setdefault(module, []).extend(read)
    return by_writer


def _matrices(module: nn.Module) -> list[str]:
    return [
        name
        for name, p in module._parameters.items()
        if p is not None and p.dim() in (2, 3) and p.dtype in _FLOATS and type(p).__name__ != "UninitializedParameter"
    ]


def _holder(modules: dict[str, nn.Module], name: str) -> tuple[str, nn.Module]:
    """Return the nearest module around another whose forward can be called."""
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            break
    return name, modules[name]


def _above(modules: dict[str, nn.Module], name: str) -> Iterator[nn.Module]:
    """Yield a module and those around it."""
    yield modules[name]
    while name:
        name = name.rpartition(".")[0]
        yield modules[name]


def _writes(module: nn.Module) -> bool:
    """Return True if a module's own code names a product, or calls an attribute whose code is not known."""
    cls = type(module)
    if cls.__module__.startswith("torch."):
        return False
    names = names_in_forward(cls)  # names in its code and in the functions that it calls
    return not _VERBS.isdisjoint(names) or any(
        callable(value) and (getattr(value, "__name__", "") in _VERBS or not is_of_torch(value))
        for name, value in vars(module).items()
        if name in names
    )


@constant_in_graphs
def names_groups(cls: type[nn.Module]) -> bool:
    """Return True if the code of a class of modules names ``grouped_mm``."""
    return not names_in_forward(cls).isdisjoint(GROUPED_NAMES)


def _reads(module: nn.Module, attribute: str) -> bool:
    return _writes(module) and attribute in names_in_forward(type(module))


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
        self.not_emulated: tuple[str, ...] = ()  # functions that read the Parameter
        self.computed = False  # whether a product read what other functions had made of the Parameter

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
        w = w if w.dim() == 2 else w[0]  # matrices of a stack are alike
        w = w if self.shape in (None, tuple(w.shape)) else w.t()  # the orientation of the model's last product
        return self.gemm(input, w.requires_grad_(), None)

    def extra_repr(self) -> str:
        """Show the Parameter before the formats."""
        return f"{self.parameter} {list(self.weight.shape)}, {self._runs}" if self.emulation else ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as any module."""
        return nn.Module.__reduce_ex__(self, protocol)


# A mode, because the products are calls of torch inside the forward of a model.
class RawMatmuls(ModelMode):
    """Emulate every product inside a ``with`` that has one of some Parameters on one side.

    Args:
        module: The module that reads them.
        read: Their owners and names.
    """

    def __init__(self, module: nn.Module, read: list[tuple[nn.Module, str]]) -> None:
        super().__init__()
        self._module, self._read = module, read
        self._known: dict[Tensor, Multiply] = {}  # keys: Parameters, their views, copies and casts
        for owner, name in read:
            multiplies = owner if isinstance(owner, EmulatedModule) else owner._modules[PRODUCTS][name]  # type: ignore[index]
            self._known[getattr(owner, name)] = partial(_gemm, multiplies)
        products = [multiply.args[0] for multiply in self._known.values()]  # type: ignore[attr-defined]
        self._follows = any(isinstance(p, ParameterProduct) and not (p.seen or p.computed) for p in products)
        self._made: dict[Tensor, Multiply] = {}  # what other functions made of Parameters alone

    multi_head = ModelMode.opened_multi_head

    def product(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a product, emulated where one side is one of the Parameters."""
        y = RULES[func](self.find, *args, **kwargs)
        if y is None:  # neither side or both are Parameters, or the rule lacks an argument
            return self.other_product(func, *args, **kwargs)
        self.repeat(self._module, self._read)
        return y

    def other_product(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Multiply by torch, and note the Parameters read."""
        self.note(func, args, kwargs)
        return self.other(func, *args, **kwargs)

    def other(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, and remember what it made of Parameters alone until they have met a product."""
        y = func(*args, **kwargs)
        if self._follows and isinstance(y, Tensor) and not torch.compiler.is_compiling():
            tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
            sources = [self.find(t) or self._made.get(t) for t in tensors if t.numel() > 1]
            if sources and sources[0] is not None and None not in sources:  # made of Parameters alone
                self._made[y] = sources[0]
        return y

    activation = add = multiply = divide = softmax = other

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Remember for the report which Parameters a function reads that is not emulated."""
        for t in () if torch.compiler.is_compiling() else tree_iter((args, kwargs)):
            made = self._made.get(t) if isinstance(t, Tensor) else None
            multiply = made or self.find(t)  # what was computed from a Parameter counts as reading it
            module = None if multiply is None else multiply.args[0]  # type: ignore[attr-defined]
            if isinstance(module, ParameterProduct) and made is not None:
                module.computed = True
            elif isinstance(module, ParameterProduct) and func.__name__ not in module.not_emulated:
                module.not_emulated = (*module.not_emulated, func.__name__)

    def view(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a view, a copy or a cast of a Parameter for that Parameter."""
        multiply = self.find(args[0])
        if multiply is None:
            return self.other(func, *args, **kwargs)
        y = func(*args, **kwargs)
        for view in (y,) if isinstance(y, Tensor) else y:
            self._known[view] = multiply
        return y

    def find(self, t: Any) -> Multiply | None:
        """Return what multiplies by a tensor, None where that is not a Parameter that the module reads."""
        if not isinstance(t, Tensor):
            return None
        multiply = self._known.get(t)
        return multiply if multiply is not None or t._base is None else self._known.get(t._base)


def _gemm(module: EmulatedModule, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return module.gemm(x, w, bias, module.parts[0])


def attach_products(
    model: nn.Module, chosen: list[tuple[str, RawMatrix, LayerPlan]], generator: Generator, total_steps: int | None
) -> None:
    """Emulate products with a model's own matrices, and those with weights of converted layers that it writes."""
    for name, matrix, plan in chosen:
        product = ParameterProduct(matrix.module, matrix.parameter)  # the owner keeps the Parameter
        product.emulate(name, plan, generator, total_steps)
        matrix.module.add_module(PRODUCTS, nn.ModuleDict(raw_products(matrix.module) | {matrix.parameter: product}))
    for module, read in writers(model, [matrix for _, matrix, _ in chosen]).items():
        wrap(module, "products", _multiplying, read)


def computed_products(model: nn.Module) -> list[ParameterProduct]:
    """Return the products that the model's code writes with what it computes of a Parameter: torch's own."""
    return [m for m in model.modules() if isinstance(m, ParameterProduct) and m.computed and not m.seen]


def raw_products(module: nn.Module) -> dict[str, ParameterProduct]:
    """Return what multiplies by a module's own Parameters, by their names; empty where nothing does."""
    products: Any = module._modules.get(PRODUCTS)
    return {} if products is None else dict(products.items())


def _multiplying(read: Any, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with the products that it writes emulated."""
    if "torch._dynamo" in sys.modules and names_groups(type(module)):  # a compiler does not ask modes about that
        return torch._dynamo.disable(_run)(read, module, forward, *args, **kwargs)
    return _run(read, module, forward, *args, **kwargs)


def _run(read: Any, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    with RawMatmuls(module, read):
        return forward(*args, **kwargs)
