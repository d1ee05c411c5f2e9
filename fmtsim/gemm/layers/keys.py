# SPDX-License-Identifier: Apache-2.0
"""A layer's definition and states, and the random keys of its passes.

A key is a seed and an offset: numbers in eager code, an int64 tensor [2] on the CPU while a compiler traces. Compiled
layers whose random quantisers all have kernels count their passes on the GPU instead, so that each replay of a CUDA
graph draws new words. An int seed fixes the keys of every pass, eager or compiled.
"""

import itertools
import math
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fmtsim.casts.arguments import drawn_key, drawn_numbers
from fmtsim.casts.lanes import READS_HOST, Key, define_operator, key_tensor
from fmtsim.casts.ops import fused_engine
from fmtsim.gemm.layers.config import OPERANDS, PRODUCTS, LinearConfig, Route
from fmtsim.scaling.history import DelayedScale, FrozenScale, LearningScale, StoredScale
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys, last_cast
from fmtsim.spec.quantizer import Hadamard, Quantizer, Sparsity
from fmtsim.support.errors import ArgumentError
from fmtsim.support.replay.hooks import drawn
from fmtsim.support.replay.programs import Programs

Generator = int | torch.Generator | None
Result = TypeVar("Result")
State = Mapping[str, DelayedScale | FrozenScale | StoredScale]

FORWARD: Final = ("x_f", "w_f")  # operands of the forward pass
UNITS, OUTPUTS, SCALES, SIGNS = 6, 9, 12, 18  # first streams of a use; those of elements begin at 0
USES: Final = {name: use for use, name in enumerate(OPERANDS)}  # streams of the operands' elements
_GROUP: Final = 128  # elements of the longest rotation that kernels take
_HOST: Final = torch.device("cpu")
_MASK64: Final = (1 << 64) - 1
# Compiled graphs are kept on disk by what they call: names of one process must mean nothing to the next.
_PROCESS: Final = uuid.uuid4().hex[:12]
# The product of an operand, and another one that may take what became of it, on which side.
_PRODUCTS_OF: Final = {
    "x_f": ("fprop", "wgrad", "b"),
    "w_f": ("fprop", "dgrad", "b"),
    "g_d": ("dgrad", "wgrad", "a"),
    "w_d": ("dgrad", "dgrad", "b"),
    "g_w": ("wgrad", "wgrad", "a"),
    "x_w": ("wgrad", "wgrad", "b"),
}
_layers: WeakValueDictionary[str, "Layer"] = WeakValueDictionary()
_numbers = itertools.count()


class Layer:
    """Hold a layer's definition, its generators and its states.

    An operator takes tensors, numbers and text: it gets the layer's name and finds the layer by it. Random draws and
    remembered scales are side effects that a compiler does not see.

    Args:
        config: The quantisers, and the machine of each product.
        generator: Where random numbers come from.
        state: What delayed scaling remembers, by operand.

    Attributes:
        name: By which ``find_layer`` finds it.
        quantizers: Of its operands, by name.
        random: Names of the operands that are rounded or rotated at random.
        folded: Names of the operands whose block scales may be folded into elements, because no unit takes them.
        sized: Whether operands are rotated or corrected in groups, which the layer's sizes have to be multiples of.
        rows: The rows of x have to be a multiple of this, the least common multiple of the groups along rows.
        routes: What the target of each product multiplies, of the products that have one.
        untouched: Names of the operands whose quantisers change nothing.
        uncast: Names of the operands that autocast does not cast before they are quantised.
        rotations: Of the products of the backward pass, what ``unrotated`` undoes: rotations of the outer axis, and of
            the inner axis where the product takes an operand of the forward pass as it was rotated.
        streams: Of its products' units and outputs: what ``random_stream`` returns for each use.
        shares_x: Whether the quantised x depends on x alone: it takes no random numbers and no remembered scale.
        runs: How many calls ran under it; each trace of a compiler is one.
    """

    def __init__(self, config: LinearConfig, generator: Generator = None, state: State | None = None) -> None:
        self.config, self.generator, self.state = config, generator, state or {}
        self.streams = [random_stream(generator, use) for use in range(SIGNS)]
        self.name = f"{_PROCESS}.{next(_numbers)}"
        # what follows from the config alone is derived once for all layers that share it
        facts = _derive_facts(config)
        self.quantizers, self.random, self.folded, self.sized, self.rows, self.routes = facts[:6]
        self.untouched, self.rotations, self.uncast = facts[6:]
        # two layers may share a quantised x only if nothing but x decides its elements
        self.shares_x = not ("x_f" in self.random or "x_f" in self.state or "x_f" in self.untouched)
        self.runs, self._programs = 0, Programs()
        self._counters: dict[torch.device, Tensor] = {}
        self._counted: dict[tuple[str, torch.device], Keys] = {}
        _layers[self.name] = self

    @cached_property
    def seed(self) -> int:
        """The seed of all keys that are made on a GPU, drawn when it is first asked for; an int is its own."""
        return self.generator if isinstance(self.generator, int) else int(drawn_key(self.generator, _HOST)[0])

    def counter(self, device: torch.device) -> Tensor:
        """Return the count of passes with counted keys on a device: int64, 0-d."""
        if device not in self._counters:
            self._counters[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._counters[device]

    def key(self, use: int, like: Tensor, *, traced: bool = False) -> Key:
        """Return the key of one use of random numbers (``random_stream``) in a call.

        In traced code the operator that draws the key takes a tensor of the pass: a compiler may move an operator
        without inputs, or run it again in the backward pass, and rotations with two sets of signs would not cancel.
        """
        stream = random_stream(self.generator, use)
        if not traced:
            return drawn(drawn_numbers, stream, like.device)
        if isinstance(stream, int):
            return key_tensor(drawn_key(stream, _HOST))
        # a node of the graph: it draws when the compiled code runs
        return torch.ops.fmtsim.draw_key(like, self.name, use)  # type: ignore[no-any-return]

    def draw_keys(self, name: str, t: Tensor, signs: Key, *, traced: bool = False) -> Keys:
        """Return the keys of an operand that is rounded at random; ``signs`` is that of the pass's rotations."""
        quantizer, use = self.quantizers[name], USES[name]
        rounds = "stochastic" in (quantizer.rounding.mode, last_cast(quantizer).rounding.mode)
        rounds_scale = quantizer.scaling is not None and quantizer.scaling.scale_rounding == "stochastic"
        elements = self.key(use, t, traced=traced) if rounds else None
        scales = self.key(SCALES + use, t, traced=traced) if rounds_scale else None
        return Keys(elements, scales, signs)  # type: ignore[arg-type]

    def memory(self) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        """Return what a pass depends on of the remembered scales: a key, and their tensors.

        None where a pass runs Python code of a state, or communicates with other ranks.
        """
        changes: list[bool] = []
        tensors: list[Tensor] = []
        for state in self.state.values():
            direct = state.direct() if isinstance(state, LearningScale) else state
            # a frozen scale reads the memory of the scale that it froze
            held = direct.memory if isinstance(direct, FrozenScale) else direct
            if held is None or (isinstance(held, DelayedScale) and held.group is not None):
                return None
            changes.append(held is direct)
            tensors += [t for t in held._buffers.values() if t is not None]
        return tuple(changes), tuple(tensors)

    def counted_keys(self, name: str, device: torch.device) -> Keys:
        """Return the keys of an operand in the passes that are counted on a device."""
        keys = self._counted.get((name, device))
        if keys is None:
            index = USES[name]
            # elements and scales of each operand have streams of their own; signs one a pass
            uses = index, SCALES + index, SIGNS + (name not in FORWARD)
            elements, scales, signs = (RandomKey(random_stream(self.seed, use)) for use in uses)  # type: ignore[arg-type]
            keys = self._counted[name, device] = Keys(elements, scales, signs, self.counter(device))
        return keys

    def repeat(
        self, key: Hashable, tensors: Sequence[Tensor | None], run: Callable[[], Result], alike: int = 0
    ) -> tuple[Result, Hashable]:
        """Run a pass on a GPU, or replay its recording; a pass reads tensors and the remembered scales.

        Args:
            key: Everything else that the pass depends on.
            tensors: The arguments of the pass.
            run: The pass.
            alike: As in ``Programs.run``, whose results are returned.
        """
        if not self.state:
            return self._programs.run(key, tensors, run, alike)
        memory = self.memory()
        if memory is None:
            return run(), None
        return self._programs.run((key, memory[0]), (*tensors, *memory[1]), run)

    def __reduce__(self) -> Any:
        return Layer, (self.config, self.generator, self.state)  # a copy has a name of its own


def find_layer(name: str) -> Layer:
    """Return the layer of a name.

    Raises:
        ArgumentError: It is gone.
    """
    layer = _layers.get(name)
    if layer is None:
        raise ArgumentError(f"{name} was compiled for a model that is gone; compile the converted model again")
    return layer


@lru_cache(maxsize=256)
def lasting_layer(config: LinearConfig, generator: Generator) -> Layer:
    """Return a layer that lives as long as the code that was compiled for it."""
    return Layer(config, generator)


def random_stream(generator: Generator, use: int) -> Generator:
    """Return the generator itself, or a seed of its own for each use in a call with an int seed.

    Uses 0 to 5 are the operands, 6 to 8 units that round stochastically, 9 to 11 outputs, 12 to 17 the scales of the
    operands, 18 and 19 the signs of rotations forward and backward.
    """
    if not isinstance(generator, int):
        return generator
    z = (generator + (use + 1) * 0x9E3779B97F4A7C15) & _MASK64  # splitmix64: near seeds give unrelated keys
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1


class _Facts(NamedTuple):
    quantizers: dict[str, Quantizer]
    random: frozenset[str]
    folded: frozenset[str]
    sized: bool
    rows: int
    routes: dict[str, Route]
    untouched: frozenset[str]
    rotations: dict[str, tuple[list[Hadamard], list[Hadamard]]]
    uncast: frozenset[str]


@lru_cache(maxsize=1024)
def _derive_facts(config: LinearConfig) -> _Facts:
    """Return the derived facts of a layer, which Layer documents."""
    quantizers = config.operands
    random = frozenset(name for name, q in quantizers.items() if q.is_stochastic or q.has_random_signs)
    # 1. operands whose scales stay apart, because the product that takes them, or a later one, has a unit
    for_units = set()
    for name, (product, later, side) in _PRODUCTS_OF.items():
        gemm = getattr(config, later)
        if getattr(config, product).emulated or (gemm.emulated and getattr(gemm, side).source != "original"):
            for_units.add(name)
    # 2. sizes: operands with groups, and the rows of x that all groups along rows divide
    sized = any(q.transforms or (q.scaling is not None and q.scaling.eden) for q in quantizers.values())
    rows = math.lcm(*(size for name, q in quantizers.items() for size in _groups_of_rows(name, q)))
    # 3. what the targets multiply, which operands stay as they are, and which rotations gradients undo
    routes = {name: config.route(name) for name in PRODUCTS if getattr(config, name).emulated}
    untouched = frozenset(name for name, q in quantizers.items() if is_untouched(q))
    befores = {"dgrad": config.fprop.a, "wgrad": config.fprop.b}
    rotations = {name: rotations_to_undo(getattr(config, name).a, before) for name, before in befores.items()}
    # 4. operands that autocast leaves in their dtype, and those whose scales may be multiplied in
    uncast = frozenset() if config.casts_weight else frozenset({"w_f", "w_d"}) - untouched
    folded = frozenset(quantizers) - for_units
    return _Facts(quantizers, random, folded, sized, rows, routes, untouched, rotations, uncast)


def is_untouched(quantizer: Quantizer) -> bool:
    """Return True if a quantiser leaves a tensor as it is."""
    return quantizer.format is None and not quantizer.transforms and quantizer.then is None


def rotations_to_undo(first: Quantizer, before: Quantizer) -> tuple[list[Hadamard], list[Hadamard]]:
    """Return the rotations that a gradient undoes, of the outer and of the inner axis, in the order of their doing.

    Args:
        first: Quantiser of the first operand of the gradient's product.
        before: Quantiser of the operand of the forward pass that it is the gradient of.
    """
    outer = [t for t in first.transforms if isinstance(t, Hadamard) and t.axis == "outer" and t.undo]
    return outer, [t for t in before.transforms if isinstance(t, Hadamard) and t.axis == "inner"]


def _groups_of_rows(name: str, quantizer: Quantizer) -> Iterator[int]:
    """Yield the sizes of an operand's groups that run along the rows of x."""
    # the axis of an operand along which the rows of x lie
    along = {"x_f": "outer", "g_d": "outer", "g_w": "inner", "x_w": "inner"}.get(name)
    for transform in quantizer.transforms:
        if isinstance(transform, Hadamard) and transform.size is not None and transform.axis == along:
            yield transform.size
        if isinstance(transform, Sparsity) and (along == "inner" or (along == "outer" and transform.tiles)):
            yield 4
    if along == "inner" and quantizer.scaling is not None and quantizer.scaling.eden:
        yield quantizer.scaling.eden


def counts_passes(layer: Layer, x: Tensor, sizes: tuple[int, ...]) -> bool:
    """Return True if kernels do every random step of a compiled layer, with keys counted on the device.

    Args:
        layer: Its definition.
        x: A tensor of the pass.
        sizes: M, N and K of its products.
    """
    random = [layer.quantizers[name] for name in layer.random]
    if not random or isinstance(layer.generator, int) or any(size % _GROUP for size in sizes):
        return False
    engine = fused_engine(x) if x.dtype == torch.bfloat16 else None
    # all random operands, or none: a pass has one way to draw
    return engine is not None and all(map(engine.counts_keys, random))


def _draw_key(like: Tensor, layer: str, use: int) -> Tensor:
    return torch.as_tensor(drawn_key(random_stream(find_layer(layer).generator, use), _HOST))


SEEDED: Final[Any] = (torch.Tag.nondeterministic_seeded,)
define_operator(
    "draw_key(Tensor like, str layer, int use) -> Tensor",
    _draw_key,
    lambda like, layer, use: torch.empty(2, dtype=torch.int64, device="cpu"),
    tags=(*SEEDED, *READS_HOST),
)
