# SPDX-License-Identifier: Apache-2.0
"""How a block's elements become its scale: the one record of scale rules.

Block formats, quantisers of operands, states of optimizers and collectives have a Scaling each; ``USES`` says which of
its fields each of them computes.
"""

import math
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, get_args

from fmtsim.formats.element import IntFormat
from fmtsim.formats.floating import E8M0, FP32, FloatFormat
from fmtsim.support.errors import FmtsimError, FormatError, shown
from fmtsim.support.records import READERS, as_int, check_types, lists_fields

Block = tuple[int | None, int | None]
ScaleRule = Literal["floor", "ceil", "rceil", "even", "amax"]
ExponentRule = Literal["floor", "ceil", "rceil", "even"]
ScalingName = Literal["none", "tensor", "channel", "block32", "tile128", "mx"]
Statistic = Literal["amax", "std", "rms", "mean_abs", "one"]
Arithmetic = Literal["divide", "reciprocal", "encode", "multiply", "double", "decode_divides"]
PowerOfTwo = Literal["floor", "ceil", "log2"]
EpsRule = Literal["statistic", "sum", "scale", "inverse"]
Empty = Literal["one", "previous", "zero"]
LevelOrder = Literal[
    "te", "te_quotient", "fouroversix", "trtllm", "modelopt", "compressed_tensors", "torchao", "quartet2"
]  # fmt: skip

_RULES: dict[ScaleRule, tuple[ExponentRule | None, FloatFormat]] = {
    "floor": ("floor", E8M0),
    "ceil": ("ceil", E8M0),
    "rceil": ("rceil", E8M0),
    "even": ("even", E8M0),
    "amax": (None, FP32),
}
SCALE_RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)
"""What verbs take as ``scale_rule``; ``block_scaling`` is the Scaling that each stands for."""


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Describe delayed scaling: the scale of a call follows from the largest magnitudes of earlier ones.

    Args:
        length: Calls that are remembered.
        algorithm: ``"max"`` takes the largest magnitude remembered, ``"most_recent"`` the last.
        refresh_every: Calls between two updates of the scale; 1 updates it after each.
        immediate: Calls at the beginning that take the scale from the tensor itself.
        fixed: Calls record nothing: the scale is what calibration (``fmtsim.ptq``) or a loaded state set, 1 before.
    """

    length: int = 1024
    algorithm: Literal["max", "most_recent"] = "max"
    refresh_every: int = 1
    immediate: int = 0
    fixed: bool = False

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        _require(not self.fixed or not self.immediate, f"fixed=True with immediate={self.immediate}", "immediate=0")
        for name, least in (("length", 1), ("refresh_every", 1), ("immediate", 0)):
            value = getattr(self, name)
            _require(
                type(value) is int and value >= least, f"History {name}={shown(value)}", f"a whole number from {least}"
            )


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorScale:
    """Describe the float32 scale of a whole tensor that brings its block scales into the range of their format.

    Args:
        top: What a block's scale is at most, the tensor's largest element given; None means the scale format's max.
        order: Whose order of float32 operations (docs/semantics.md, section 6): Transformer Engine's, that of its
            recipes for rows and windows, fouroversix's, TensorRT-LLM's with fast math, ModelOpt's,
            compressed-tensors', torchao's or Quartet II's.
        block: Elements that share the scale, ``(outer, inner)``: ``(1, None)`` is a scale a row.
    """

    top: float | None = None
    order: LevelOrder = "te"
    block: Block = (None, None)

    def __post_init__(self) -> None:
        check_block("TensorScale ", self.block)
        check_types(self, FormatError)
        _positive("TensorScale top", self.top)


# Fields of rules of one level: what two levels do in their place has an order of its own.
_ONE_LEVEL: Final = ("factor", "offset", "margin", "eps", "arithmetic", "power_of_two", "multiplier", "allowed")


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Describe how the scale of a block follows from its elements; an element is then ``round(x / scale)``.

    All operations are float32, each rounded to nearest even, in the order that ``fmtsim.scaling.scales`` defines.

    Args:
        block: Elements that share a scale, ``(outer, inner)`` as in BlockFormat; None is the whole extent.
        exponent_rule: Take the scale ``2**e`` from the exact exponent of the largest magnitude (OCP MX v1.0, 6.3, and
            its variants; docs/semantics.md, section 5), the nearest that ``scale`` has, from -127 to 127; of a block of
            zeros the lowest. The fields of real scales then mean nothing. None makes a real scale.
        zero_point: An integer zero point shifts the grid to the block's range of values (section 7).
        statistic: The number of a block: the largest magnitude, the standard deviation (population, mean removed),
            the root mean square, the mean magnitude, or the number one (a scale that is fixed).
        factor: The scale is ``statistic * factor + offset``; None means that the statistic becomes ``top``.
        offset: Added to the scale before it is rounded.
        top: What the statistic becomes in the element format; None means the format's largest value.
        margin: The top is ``top * 2**-margin``.
        eps: Least statistic, number added to it, or least scale, as ``eps_rule`` says.
        eps_rule: ``"statistic"`` max(statistic, eps), ``"sum"`` statistic + eps, ``"scale"`` max(scale, eps),
            ``"inverse"`` elements are x * (1 / max(scale, eps)) while the scale itself stays as it is; under "divide"
            they are x / max(s, eps), s being the scale before it is stored.
        arithmetic: ``"divide"`` s = statistic / top, elements x / s; ``"reciprocal"`` elements x * (1 / s);
            ``"multiply"`` s = statistic * (1 / top), elements x * (1 / s); ``"encode"`` r = top / statistic, elements
            x * r, s = 1 / r; ``"double"`` as encode, r being the float32 of a float64 quotient; ``"decode_divides"``
            r is the scale itself: elements x * r, values q / r.
        power_of_two: Round the scale to a power of two, down or up ("encode" rounds r the other way). ``"log2"`` is for
            "encode": ``2**-floor(log2(r))`` with r = (1 / statistic) * top, every step rounded to the tensor's dtype,
            where a logarithm may carry into the next power; and for "divide": ``2**ceil(log2(statistic / top))``, every
            step rounded to ``scale``, float32 or 16 bits of torch's.
        multiplier: What a scale is multiplied by after it became a power of two.
        scale: The format that stores the scale, a name or a record; of integers (``"uint6"``) as floats of one exponent
            bit, which have the same values and codes.
        input_scale: Store the scale in the tensor's own dtype where that has 16 bits, else in ``scale``.
        scale_rounding: Rounding into that format; under ``eden`` that of the corrected scales.
        allowed: Scales to choose from, ascending: the least that is not below the scale, or the largest.
        tensor: The second level, or None. With one, factor, offset, margin, eps, arithmetic, power_of_two, multiplier
            and allowed keep their defaults.
        candidates: Numbers that a block's scale is multiplied with; the one of least error counts, the first in a tie.
        metric: The error that candidates are compared by: mean absolute or mean squared.
        eden: Elements of a group whose scales are corrected so that ``<x, q> = <x, x>`` (EDEN); None corrects nothing.
        empty: Scale of a block of zeros: one, what it was before, or zero.
        history: Delayed scaling, or None.
    """

    block: Block = (None, None)
    exponent_rule: ExponentRule | None = None
    zero_point: bool = False
    statistic: Statistic = "amax"
    factor: float | None = None
    offset: float = 0.0
    top: float | None = None
    margin: int = 0
    eps: float = 0.0
    eps_rule: EpsRule = "statistic"
    arithmetic: Arithmetic = "encode"
    power_of_two: PowerOfTwo | None = None
    multiplier: float = 1.0
    scale: FloatFormat = FP32
    input_scale: bool = False
    scale_rounding: Literal["nearest_even", "stochastic"] = "nearest_even"
    allowed: tuple[float, ...] = ()
    tensor: TensorScale | None = None
    candidates: tuple[float, ...] = (1.0,)
    metric: Literal["mae", "mse"] = "mae"
    eden: int | None = None
    empty: Empty = "one"
    history: History | None = None

    def __post_init__(self) -> None:
        check_block("Scaling ", self.block)
        scale: Any = self.scale
        if not isinstance(scale, FloatFormat):
            object.__setattr__(self, "scale", _scale_format(scale))
        check_types(self, FormatError)
        for name in ("factor", "top", "multiplier"):
            _positive(f"Scaling {name}", getattr(self, name))
        for value in (*self.candidates, *self.allowed):
            _positive("Scaling candidates and allowed", value)
        _require(list(self.allowed) == sorted(self.allowed), f"Scaling allowed={self.allowed}", "an ascending tuple")
        _require(self.eps >= 0 and self.offset >= 0, f"eps={self.eps}, offset={self.offset}", "numbers from 0")
        _require(bool(self.candidates), "no candidates", "(1.0,) or several")
        _require(self.tensor is None or self.scale != FP32, "tensor= with scale fp32", "a scale such as e4m3")
        both = self.factor is not None and self.top is not None
        _require(not both, "factor= and top= together", "one: a factor, or what becomes the top")
        inverts = self.eps_rule != "inverse" or (
            self.arithmetic in ("reciprocal", "divide") and self.candidates == (1.0,)
        )
        _require(inverts, "eps_rule='inverse' of this rule", "arithmetic='reciprocal' or 'divide', and one candidate")
        log2, divides = self.power_of_two == "log2", self.arithmetic == "divide" and not self.offset
        has_dtype = self.scale.name in ("fp32", "bf16", "fp16")
        encodes = self.arithmetic == "encode" or (divides and has_dtype and self.multiplier == 1)
        _require(
            not log2 or (encodes and self.factor is None),
            "power_of_two='log2' of this rule",
            "arithmetic='encode', or 'divide' with a scale of fp32, bf16 or fp16, without factor=",
        )
        of_input = self.input_scale or (log2 and not divides) or self.eps_rule == "inverse"
        alone = not of_input or (self.tensor is None and self.history is None)
        _require(alone, "input_scale, 'log2' or 'inverse' with tensor= or history=", "a rule of one level without one")
        pairs = zip(self.block, self.level_block, strict=True)
        whole_blocks = all(level is None or (size is not None and level % size == 0) for size, level in pairs)
        _require(whole_blocks, f"{self.tensor} with block={self.block}", "a TensorScale block of whole blocks, or None")
        # a history is of the whole tensor; with two levels, calibration fixes the scale of the tensor alone
        fixed = self.history is not None and self.history.fixed
        two_levels = fixed and self.tensor is not None and self.tensor == TensorScale(top=self.tensor.top)
        of_tensor = self.history is None or self.block == (None, None) or two_levels
        _require(of_tensor, f"history= with block={self.block}", "block=(None, None)")
        for field in () if self.tensor is None else fields(self):
            value = getattr(self, field.name)
            allowed = field.name not in _ONE_LEVEL or value == field.default
            _require(allowed, f"tensor= with {field.name}={shown(value)}", f"{field.default!r}; its order says how")

    def __hash__(self) -> int:  # caches ask for it in every call: a few fields tell rules apart
        return hash((self.block, self.statistic, self.arithmetic, self.power_of_two, self.exponent_rule, self.factor))

    @property
    def is_direct(self) -> bool:
        """Whether a block's scale follows from its statistic and, with two levels, Transformer Engine's tensor scale.

        Kernels of block formats make such scales; the others are made by torch's operators.
        """
        return self.candidates == (1.0,) and self.tensor in (None, TensorScale()) and self.has_usual_rule

    @property
    def has_usual_rule(self) -> bool:
        """Whether the scale is the statistic over the top, or a power of two by the exponent, and nothing else."""
        return _of_rules(self) == _USUAL and self.arithmetic in ("divide", "reciprocal", "encode")

    @property
    def level_block(self) -> Block:
        """Elements that share a number of the second level of scales; (None, None) with one level, too."""
        return (None, None) if self.tensor is None else self.tensor.block

    @property
    def blocks_per_level(self) -> Block:
        """Blocks, outer and inner, that share a number of the second level of scales; None is all of them."""
        pairs = zip(self.level_block, self.block, strict=True)
        outer, inner = (None if whole is None or size is None else whole // size for whole, size in pairs)
        return outer, inner

    @property
    def scale_rule(self) -> ScaleRule:
        """The name of the rule as verbs take it: the exponent's, or ``"amax"`` for real scales."""
        return self.exponent_rule or "amax"

    @property
    def rule_text(self) -> str:
        """What a scale is made of, in words: the name of the rule, and how a real scale becomes a power of two."""
        return self.scale_rule + (f", a power of two by {self.power_of_two}" if self.power_of_two else "")

    def __str__(self) -> str:
        whole: dict[Block, str] = {(None, None): "the tensor", (1, None): "each row"}
        words = [f"{self.statistic} of {whole.get(self.block) or block_text(self.block)}"]
        words += [f"x {self.factor:g}"] if self.factor is not None else []
        words += [f"to {self.top:g}"] if self.top is not None else []
        words += [f"margin {self.margin}"] if self.margin else []
        words += [f"exponent by {self.exponent_rule}"] if self.exponent_rule else []
        words += ["zero point"] if self.zero_point else []
        words += [f"power of two by {self.power_of_two}"] if self.power_of_two else []
        words += [f"in {self.scale.name}"] if self.scale != FP32 else []
        words += ["in the tensor's dtype"] if self.input_scale else []
        words += [f"{level_text(self.tensor)} ({self.tensor.order})"] if self.tensor else []
        words += [f"best of {', '.join(f'{c:g}' for c in self.candidates)} by {self.metric}"] * (
            len(self.candidates) > 1
        )
        words += [f"EDEN over {self.eden}"] if self.eden else []
        if self.history:
            words.append(
                "calibrated" if self.history.fixed else f"{self.history.algorithm} of {self.history.length} calls"
            )
        return ", ".join(words)


_STEPS: Final = ("factor", "offset", "top", "margin", "eps", "eps_rule", "power_of_two", "multiplier", "allowed")
_of_rules = attrgetter(*_STEPS)
_USUAL: Final = tuple(field.default for field in fields(Scaling) if field.name in _STEPS)


class Use(NamedTuple):
    """Which fields of a Scaling its owner computes; the others keep their defaults.

    fields: The values that a field may have, by its name; an empty tuple allows all. instead: What else to do.
    """

    fields: dict[str, tuple[Any, ...]]
    instead: str = ""


_ONE_FLOAT32_SCALE: Final[dict[str, tuple[Any, ...]]] = dict.fromkeys((*_STEPS, "arithmetic"), ())
USES: Final[dict[str, Use]] = {
    "a block format": Use(
        dict.fromkeys(("block", "scale", "exponent_rule", "tensor", "zero_point", "candidates", "metric"), ())
        | _ONE_FLOAT32_SCALE
        | {"arithmetic": ("divide", "reciprocal", "encode", "multiply", "double")},
        ", or a Quantizer for it",
    ),
    "a quantiser": Use(
        {field.name: () for field in fields(Scaling) if field.name not in ("exponent_rule", "zero_point")}
        | {"arithmetic": ("divide", "reciprocal", "encode", "multiply", "double"), "empty": ("one", "previous")},
        ", or pass BlockFormat(element=, scaling=)",
    ),
    "a reduction": Use(
        _ONE_FLOAT32_SCALE
        | {"statistic": ("amax", "one"), "arithmetic": ("reciprocal", "encode", "multiply", "double")}
    ),
    "a gathered tensor": Use(
        _ONE_FLOAT32_SCALE | {"arithmetic": ("divide", "reciprocal", "encode", "multiply", "double")},
        ", such as Scaling()",
    ),
}
"""What each owner of a Scaling takes; optimizer states take whole rules (``STATE_RULES``, fmtsim/spec/optimizer.py)."""


def check_use(owner: str, scaling: Scaling, use: str, error: type[FmtsimError] = FormatError) -> None:
    """Raise an error where a Scaling has a field that its owner does not compute; ``use`` is a key of ``USES``."""
    taken, instead = USES[use]
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        allowed = taken.get(field.name, (field.default,))
        if allowed and value not in allowed:
            raise error(
                f"{owner} scaling=[{scaling}]: {use} takes no {field.name}={shown(value)}; "
                f"choose {', '.join(map(repr, allowed))}{instead}"
            )


def _scale_format(scale: Any) -> Any:
    """Return the record of a scale's format; integers become floats with an exponent field of one bit."""
    fmt = READERS[FloatFormat](scale, "") if isinstance(scale, str) else scale
    if not isinstance(fmt, IntFormat) or fmt.half_offset:
        return fmt
    # subnormals and the one binade above them count in steps of the same size
    mantissa_bits = fmt.bits - fmt.signed - 1
    return FloatFormat(
        name=fmt.name, exponent_bits=1, mantissa_bits=mantissa_bits, bias=1 - mantissa_bits + fmt.fraction_bits,
        signed=fmt.signed, nan="none", infinities=False,
    )  # fmt: skip


def block_scaling(block: Block, scale_rule: ScaleRule = "amax", **fields: Any) -> Scaling:
    """Return the Scaling of a block format: a rule by its name, and real scales by ``"reciprocal"`` unless told.

    Raises:
        FormatError: The rule is unknown.
    """
    return Scaling(**{"block": block, "arithmetic": "reciprocal"} | rule_fields(scale_rule) | fields)


def rule_fields(scale_rule: ScaleRule) -> dict[str, Any]:
    """Return the fields of a Scaling that the name of a rule stands for."""
    if not isinstance(scale_rule, str) or scale_rule not in _RULES:
        raise FormatError(f"scale_rule={shown(scale_rule)} is unknown; choose {', '.join(SCALE_RULES)}")
    exponent_rule, scale = _RULES[scale_rule]
    return {"exponent_rule": exponent_rule, "scale": scale}


def block_text(block: Block, times: str = "x") -> str:
    """Return the size of blocks, such as ``"1x32"`` or ``"1xall"``; ``"one block"`` where a tensor is one."""
    return "one block" if block == (None, None) else times.join("all" if n is None else str(n) for n in block)


def level_text(tensor: TensorScale) -> str:
    """Return what the second level of scales belongs to, such as ``"tensor scale"`` or ``"scale of 1xall"``."""
    return "tensor scale" if tensor.block == (None, None) else f"scale of {block_text(tensor.block)}"


def check_block(of: str, block: Any) -> None:
    """Raise FormatError for what is not a block; ``of`` says whose it is."""
    sizes = isinstance(block, tuple) and len(block) == 2
    possible = sizes and all(size is None or (type(as_int(size)) is int and 1 <= size < 1 << 63) for size in block)
    example = f"; block=(1, {block}) is {block} of a row" if type(block) is int and block > 0 else ""
    _require(possible, f"{of}block={shown(block)}", f"(outer, inner) sizes of 1 or more, or None{example}")


def _require(condition: bool, given: str, allowed: str) -> None:
    if not condition:
        raise FormatError(f"{given} is not allowed; choose {allowed}")


def _positive(name: str, value: float | None) -> None:
    good = value is None or (math.isfinite(value) and value > 0)
    _require(good, f"{name}={shown(value)}", "a finite number above 0")


SCALINGS: dict[ScalingName, tuple[Block, Block, ScaleRule] | None] = {
    "none": None,
    "tensor": ((None, None), (None, None), "amax"),
    "channel": ((1, None), (1, None), "amax"),
    "block32": ((1, 32), (1, 32), "amax"),
    "tile128": ((1, 128), (128, 128), "amax"),
    "mx": ((1, 32), (1, 32), "floor"),
}
"""``scaling=`` of linear_config: block of x and g (outer, inner along the contraction axis), block of w, scale rule."""
