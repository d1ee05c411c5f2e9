# SPDX-License-Identifier: Apache-2.0
"""Differential fuzzing: the bits of fmtsim against those of other libraries, on drawn formats, layouts and data.

A peer yields comparisons; ``run`` draws them in turn, counts what differs, and makes each difference as small as it
gets. What is known to differ has a name in its comparison, and is counted by that.
"""

import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy
import torch
from torch import Tensor

import fmtsim
from fmtsim.casts.encoded import Encoded
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.element import ElementFormat, FloatFormat
from fmtsim.formats.floating import Overflow
from fmtsim.formats.packed import GGML_FORMATS
from fmtsim.formats.scaling import Scaling
from fmtsim.lab.cli.output import format_table
from fmtsim.lab.verify.outcome import bits_of, boundaries
from fmtsim.lab.verify.probe_operands import spread, sprinkled
from fmtsim.rounding.modes import RULES, Mode, Rounding
from tools.fuzz import tensors

Cast = Callable[[Tensor], Tensor]
Known = Callable[[Tensor, Tensor, Tensor], Tensor]
ROWS, COLUMNS = 512, 128


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Hold what fmtsim and a peer make of the same rows of numbers.

    Args:
        what: What is computed, in words; the table has a line for each.
        details: The format and options that were drawn.
        x: The numbers, in any layout.
        ours, theirs: Functions of rows; results have an element for each of x, or one for each row.
        rule: The definition that decides.
        row: Numbers that are computed together: 1, a block's, or a dot product's operands.
        known: Where the peer differs by intention: a name, and a function of rows and both results that marks such
            results.
    """

    what: str
    details: str
    x: Tensor
    ours: Cast
    theirs: Cast
    rule: str
    row: int = 1
    known: tuple[tuple[str, Known], ...] = ()

    def outcome(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Counter[str]]:
        """Return both results by rows, where bits differ for no known reason, and how many differ by which reason."""
        rows = tensors.plain(x).reshape(-1, self.row)
        if not len(rows):
            empty = self.ours(x).reshape(0, 1)
            return empty, empty, empty.bool(), Counter()
        ours, theirs = (f(y).detach().reshape(len(rows), -1) for f, y in ((self.ours, x), (self.theirs, rows)))
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (ours.dtype, theirs.dtype, self.what)
        wrong = (bits_of(ours) != bits_of(theirs)) & ~((ours != ours) & (theirs != theirs))
        reasons: Counter[str] = Counter()
        if wrong.any():
            for name, marks in self.known:
                by_reason = wrong & marks(rows, ours, theirs)
                reasons[name] += int(by_reason.sum())
                wrong = wrong & ~by_reason
        return ours, theirs, wrong, reasons

    def smallest(self, wrong: Tensor) -> str:
        """Return the first difference as text, with zeros in place of all numbers that it does not need."""
        number, column = (int(i) for i in wrong.nonzero()[0])
        row = tensors.plain(self.x).reshape(-1, self.row)[number : number + 1].clone()
        if not self.outcome(row)[2].any():
            kind = f"shape {tuple(self.x.shape)}, strides {self.x.stride()}, offset {self.x.storage_offset()}"
            return f"row {number} differs in this layout alone: {kind}"
        for i in range(self.row):
            smaller = row.clone()
            smaller[0, i] = 0.0
            if self.outcome(smaller)[2].any():
                row = smaller
        ours, theirs, wrong, _ = self.outcome(row)
        column = int(wrong[0].nonzero()[0])
        inputs = {i: shown(row[0, i]) for i in range(self.row) if self.row == 1 or row[0, i] != 0}
        at = f" at {column}" if self.row > 1 else ""
        return f"{inputs}{at}: fmtsim {shown(ours[0, column])}, peer {shown(theirs[0, column])}"


def shown(x: Tensor) -> str:
    """Return a number with its bits."""
    return f"{x.item()!r} ({int(bits_of(x.reshape(1))) % (1 << 8 * x.element_size()):#0{2 + 2 * x.element_size()}x})"


@dataclass
class Findings:
    """Count what was compared, for each peer and what is computed, and keep the first difference of each."""

    compared: Counter[tuple[str, str]] = field(default_factory=Counter)
    differing: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    seconds: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, peer: str, comparison: Comparison, seed: int) -> None:
        start = time.perf_counter()
        key = peer, comparison.what
        ours, _, wrong, reasons = comparison.outcome(comparison.x)
        self.compared[key] += ours.numel()
        self.reasons.setdefault(key, Counter()).update(reasons)
        self.seconds[key] += time.perf_counter() - start
        if wrong.any():
            self.differing[key] += int(wrong.sum())
            if key not in self.first:
                text = f"{comparison.details}: {comparison.smallest(wrong)}\n    rule: {comparison.rule} (seed {seed})"
                self.first[key] = text

    def __str__(self) -> str:
        lines = [
            (*key, f"{count:,}", f"{self.differing[key]:,}", f"{count / self.seconds[key] * 3600 / 1e6:,.1f}",
             "; ".join(f"{n:,} {name}" for name, n in self.reasons[key].items() if n) or "-")
            for key, count in sorted(self.compared.items())
        ]  # fmt: skip
        head = ("peer", "what", "values compared", "differences", "millions an hour", "known to differ")
        parts = [format_table(head, lines, left=(0, 1, 5))]
        parts += [f"{peer}, {what}: {text}" for (peer, what), text in self.first.items()]
        total = f"{self.compared.total():,} values compared, {self.differing.total():,} differ for no known reason"
        return "\n".join([*parts, total])


Peer = Callable[[Random], Comparison]
PEERS: dict[str, tuple[str, list[Peer]]] = {}


def peer(name: str, module: str | None = None) -> Callable[[Peer], Peer]:
    """Register a function that draws a comparison with a library."""

    def register(draw: Peer) -> Peer:
        PEERS.setdefault(name, (module or name, []))[1].append(draw)
        return draw

    return register


def run(names: Sequence[str], minutes: float, seed: int) -> Findings:
    """Compare with the peers that are installed, each for the same time; name those that are not."""
    findings = Findings()
    installed = [name for name in names if importlib.util.find_spec(PEERS[name][0])]
    for name in names:
        if name not in installed:
            print(f"{name} is skipped: there is no module {PEERS[name][0]}")
    end, spent = time.monotonic() + 60 * minutes, Counter(dict.fromkeys(installed, 0.0))
    while installed and time.monotonic() < end:
        name, start = min(installed, key=spent.__getitem__), time.monotonic()
        for draw in PEERS[name][1]:
            try:
                findings.add(name, draw(Random(f"{seed} {name} {draw.__name__}")), seed)
            except Exception as error:
                findings.differing[name, draw.__name__] += 1
                findings.first.setdefault((name, draw.__name__), f"raised {error!r} (seed {seed})")
        spent[name] += time.monotonic() - start
        seed += 1
    return findings


# Data.


def data(r: Random, fmt: ElementFormat, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return numbers on which casts to a format differ: bit patterns, ties, the ends of its range, mixed scales."""
    generator = torch.Generator().manual_seed(r.getrandbits(32))
    kind = r.choice(("patterns", "ties", "ties", "subnormal", "overflow", "special", "mixed", "normal"))
    if kind == "patterns":
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        info = torch.iinfo(width)
        return torch.randint(info.min, info.max, shape, generator=generator, dtype=torch.int64).to(width).view(dtype)
    if kind == "ties" and fmt.bits <= 10:
        points = boundaries(fmt, torch.float32).to(dtype)
        return points[torch.randint(len(points), shape, generator=generator)]
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    smallest = getattr(fmt, "min_exponent", 0) - fmt.mantissa_bits if hasattr(fmt, "mantissa_bits") else 0
    if kind == "subnormal":
        x = x * 2.0 ** (smallest + r.randint(-1, 3))
    elif kind == "overflow":
        x = x.sign() * fmt.max * (1 + torch.randint(-64, 65, shape, generator=generator) / 256)
    elif kind == "mixed":
        x = spread(shape, (max(smallest - 3, -150), min(fmt.max_exponent + 3, 127)), generator)
    elif kind == "special":
        x = sprinkled(x, (0.0, -0.0, torch.inf, -torch.inf, torch.nan), 9, generator)
    return x.to(dtype)


def laid_out(r: Random, x: Tensor, row: int = 1) -> Tensor:
    """Return the same numbers strided, transposed, expanded or empty, where rows stay whole."""
    y = tensors.layout(r, x[:0] if r.random() < 0.01 else x, strange=0.0)
    return y if y.dim() and y.shape[-1] % row == 0 and type(y) in (Tensor, torch.nn.Parameter) else x


def element(
    r: Random, what: str, fmt: ElementFormat, theirs: Cast, *, mode: Mode = "nearest_even",
    overflow: Overflow = "saturate", dtypes: Sequence[torch.dtype] = (torch.float32,), out: torch.dtype = torch.float32,
    change: Cast = lambda x: x, known: tuple[tuple[str, Known], ...] = (), **options: Any,
) -> Comparison:  # fmt: skip
    """Return the comparison of a cast, by values that quantize returns or by codes that encode and decode pass on."""
    rounding = Rounding(
        mode=mode, **{name: options.pop(name) for name in ("random_bits", "variant") if name in options}
    )
    x = change(data(r, fmt, r.choice(dtypes), (ROWS, COLUMNS)))
    if not options:  # random words are of the elements in order
        x = laid_out(r, x)
    by_codes = r.random() < 0.5

    def ours(x: Tensor) -> Tensor:
        words = {name: value[: x.numel()].reshape(x.shape) for name, value in options.items()}
        if by_codes:
            return fmtsim.decode(fmtsim.encode(x, fmt, rounding, overflow=overflow, **words), out_dtype=out)
        return fmtsim.quantize(x, fmt, rounding, overflow=overflow, out_dtype=out, **words)

    rule = f"{mode} takes {RULES[mode].takes}; overflow={overflow!r}; docs/semantics.md, sections 1 to 3"
    details = f"{fmt.name}, {mode}, {overflow}, {x.dtype}, by {'codes' if by_codes else 'values'}"
    return Comparison(what=what, details=details, x=x, ours=ours, theirs=theirs, rule=rule, known=known)


# Known differences, by names.

ZERO: tuple[str, Known] = ("zeros by sign", lambda x, ours, theirs: (ours == 0) & (theirs == 0))
HALFWAY: tuple[str, Known] = (
    "ties, which go to the smaller magnitude",
    lambda x, ours, theirs: torch.cat(
        [(ours[:, :-1] - x).abs() == (theirs[:, :-1] - x).abs(), ours[:, -1:] != ours[:, -1:]], 1
    ),
)
SPECIAL: tuple[str, Known] = (
    "NaN or Inf in a block, whose scale is of finite elements here",
    lambda x, ours, theirs: (~x.isfinite()).any(1, keepdim=True).expand(ours.shape),
)
UNVERIFIED: tuple[str, Known] = (
    "Inf and NaN between blocks of CDNA3, of which there is no recording",
    lambda x, ours, theirs: ~(ours.isfinite() & theirs.isfinite()),
)
BELOW: tuple[str, Known] = ("numbers below an unsigned format's zero", lambda x, ours, theirs: x < 0)
NO_NAN: tuple[str, Known] = ("NaN to a format without NaN: the largest value here", lambda x, ours, theirs: x.isnan())


def log2_of(top: float) -> tuple[str, Known]:
    """Return what differs by a float32 logarithm that is a whole number already next to powers of two."""

    def marks(x: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
        mantissa, _ = torch.frexp(x.double().abs().amax(1, keepdim=True) / top)
        near = (mantissa < 0.5 + 1e-6) | (mantissa > 1 - 1e-6)
        return (near & (ours[:, -1:] != theirs[:, -1:])).expand(ours.shape)

    return "log2 in float32, next to powers of two", marks


# ml_dtypes and numpy: casts to nearest even of 16 and 32 bits (float64 it rounds twice), values of codes.

ML_DTYPES = {
    "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e4m3_ieee": "float8_e4m3", "e5m2": "float8_e5m2",
    "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz", "e4m3b11fnuz": "float8_e4m3b11fnuz",
    "e3m4": "float8_e3m4", "e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn", "e2m1": "float4_e2m1fn",
    "e8m0": "float8_e8m0fnu",
}  # fmt: skip


def _ml_dtype(name: str) -> Any:
    import ml_dtypes

    return numpy.dtype(getattr(ml_dtypes, ML_DTYPES[name])) if name in ML_DTYPES else numpy.dtype("float16")


@peer("ml_dtypes")
def ml_dtypes_cast(r: Random) -> Comparison:
    name = r.choice([*ML_DTYPES, "fp16"])
    fmt, dtype = fmtsim.get_format(name), _ml_dtype(name)

    def theirs(x: Tensor) -> Tensor:
        with numpy.errstate(all="ignore"):
            return torch.from_numpy(x.float().numpy().astype(dtype).astype(numpy.float32))

    overflow: Overflow = "ieee" if fmt.has_nan else "saturate"
    known = () if fmt.has_nan else (NO_NAN,)
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
    if name == "e8m0":  # no zero, no sign: numbers of its range alone; halves go up, which is nearest_away there
        change = lambda x: x.float().abs().nan_to_num(1.0, 1.0).clamp(2.0**-126, 2.0**127)  # noqa: E731
        return element(r, "casts", fmt, theirs, mode="nearest_away", overflow=overflow, dtypes=dtypes, change=change)
    return element(r, "casts", fmt, theirs, overflow=overflow, dtypes=dtypes, known=known)


# gfloat: its formats and those of P3109, five roundings, three stochastic ones by random integers.

GFLOAT_MODES = {
    "nearest_even": "TiesToEven", "nearest_away": "TiesToAway", "toward_zero": "TowardZero", "up": "TowardPositive",
    "down": "TowardNegative",
}  # fmt: skip
GFLOAT_VARIANTS = {"a": "StochasticFastest", "b": "StochasticFast", "c": "Stochastic"}
GFLOAT_FORMATS = {
    "e4m3": "ocp_e4m3", "e5m2": "ocp_e5m2", "e2m3": "ocp_e2m3", "e3m2": "ocp_e3m2", "e2m1": "ocp_e2m1",
    "fp16": "binary16", "bf16": "bfloat16",
}  # fmt: skip


def gfloat_info(fmt: FloatFormat) -> Any:
    """Return gfloat's record of a format, P3109 formats by their parameters."""
    import gfloat.formats

    if fmt.name in GFLOAT_FORMATS:
        return getattr(gfloat.formats, f"format_info_{GFLOAT_FORMATS[fmt.name]}")
    domain = gfloat.Domain.Extended if fmt.infinities else gfloat.Domain.Finite
    signedness = gfloat.Signedness.Signed if fmt.signed else gfloat.Signedness.Unsigned
    precision = fmt.bits - fmt.exponent_bits - fmt.signed + 1
    return gfloat.formats.format_info_p3109(fmt.bits, precision, signedness, domain)


def _gfloat_format(r: Random) -> FloatFormat:
    names = [name for name in fmtsim.list_formats("float") if name.startswith("p3109")]
    return fmtsim.get_format(r.choice(names) if r.random() < 0.7 else r.choice(list(GFLOAT_FORMATS)))


def _without_nan(fmt: FloatFormat) -> Cast:
    """Return what replaces NaN where a format has none: gfloat refuses it."""
    return lambda x: x if fmt.has_nan else x.nan_to_num(1.0, torch.inf, -torch.inf)


@peer("gfloat")
def gfloat_round(r: Random) -> Comparison:
    import gfloat

    fmt, overflow = _gfloat_format(r), r.choice(("saturate", "ieee"))
    overflow = overflow if fmt.has_nan or fmt.infinities else "saturate"
    mode = r.choice(list(GFLOAT_MODES))

    def theirs(x: Tensor) -> Tensor:
        way = getattr(gfloat.RoundMode, GFLOAT_MODES[mode])
        return torch.from_numpy(gfloat.round_ndarray(gfloat_info(fmt), x.double().numpy(), way, overflow == "saturate"))

    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    return element(r, "casts", fmt, theirs, mode=mode, overflow=overflow, dtypes=dtypes, out=torch.float64,
                   change=_without_nan(fmt), known=(BELOW,) * (not fmt.signed))  # fmt: skip


@peer("gfloat")
def gfloat_stochastic(r: Random) -> Comparison:
    import gfloat

    fmt, variant, bits = _gfloat_format(r), r.choice("abc"), r.choice((1, 3, 8, 13))
    words = torch.randint(1 << bits, (ROWS * COLUMNS,), generator=torch.Generator().manual_seed(r.getrandbits(32)))

    def theirs(x: Tensor) -> Tensor:
        way = getattr(gfloat.RoundMode, GFLOAT_VARIANTS[variant])
        numbers, drawn = x.double().numpy(), words[: x.numel()].reshape(x.shape).numpy()
        return torch.from_numpy(gfloat.round_ndarray(gfloat_info(fmt), numbers, way, True, drawn, bits))

    return element(r, "stochastic rounding by given integers", fmt, theirs, mode="stochastic", out=torch.float64,
                   change=_without_nan(fmt), known=(BELOW,) * (not fmt.signed), random_bits=bits,
                   variant=variant, random_words=words)  # fmt: skip


# torchao: narrow floats by bits, MX blocks by four scale rules, NVFP4 of one level.


def _blocks(fmt: BlockFormat, **options: Any) -> Cast:
    """Return what gives the values of each block with its scale behind them."""

    def run(x: Tensor) -> Tensor:
        encoded = fmtsim.encode(x, fmt, **options)
        assert encoded.scales is not None
        scales = encoded.scales.reshape(-1, 1)
        scales = fmtsim.decode(scales, fmt.scale, out_dtype=torch.float32) if scales.dtype == torch.uint8 else scales
        values = fmtsim.decode(encoded, out_dtype=torch.float32)
        return torch.cat([values.reshape(len(scales), -1), scales.float()], 1) if x.numel() else values

    return run


def blocks(
    r: Random, what: str, fmt: BlockFormat, theirs: Cast, *, dtypes: Sequence[torch.dtype] = (torch.float32,),
    finite: bool = False, known: tuple[tuple[str, Known], ...] = (), **options: Any,
) -> Comparison:  # fmt: skip
    """Return the comparison of a block format's values and scales."""
    size, dtype = fmt.block[1] or COLUMNS, r.choice(dtypes)
    x = data(r, fmt.element, dtype, (ROWS, COLUMNS))
    if r.random() < 0.8:  # every row at a scale of its own
        x = (
            x.double()
            * torch.exp2(torch.randint(-40, 40, (ROWS, 1), generator=torch.Generator().manual_seed(r.getrandbits(32))))
        ).to(dtype)
    x = x.nan_to_num(1.0, 1.0, -1.0) if finite else x
    rule = f"scale rule {options.get('scale_rule', fmt.scale_rule)!r}; docs/semantics.md, sections 4 to 6"
    return Comparison(what=what, details=f"{fmt.name}, {options}, {dtype}", x=laid_out(r, x, size), rule=rule, row=size,
                      ours=_blocks(fmt, **options), theirs=theirs, known=known)  # fmt: skip


@peer("torchao")
def torchao_floatx(r: Random) -> Comparison:
    from torchao.prototype.custom_fp_utils import _f32_to_floatx_unpacked, _floatx_unpacked_to_f32

    e, m = r.choice([(e, m) for e in range(2, 7) for m in range(1, 6) if 1 + e + m <= 8])
    fmt = FloatFormat(name=f"e{e}m{m}", exponent_bits=e, mantissa_bits=m, nan="none", infinities=False)
    theirs = lambda x: _floatx_unpacked_to_f32(_f32_to_floatx_unpacked(x, e, m), e, m)  # noqa: E731
    return element(r, "narrow floats", fmt, theirs, change=lambda x: x.nan_to_num(1.0, torch.inf, -torch.inf))


@peer("torchao")
def torchao_mx(r: Random) -> Comparison:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import get_fp_scale, to_dtype, to_mx

    kinds = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp6_e2m3": "fp6_e2m3",
             "mxfp6_e3m2": "fp6_e3m2", "mxfp4": torch.float4_e2m1fn_x2}  # fmt: skip
    name, rule = r.choice(list(kinds)), r.choice(("floor", "ceil", "rceil", "even"))

    def theirs(x: Tensor) -> Tensor:
        scales, codes = to_mx(x, kinds[name], 32, ScaleCalculationMode[rule.upper()])
        values = to_dtype(codes, scales, kinds[name], 32, torch.float32)
        return torch.cat([values.reshape(len(x), -1), get_fp_scale(scales).reshape(-1, 1)], 1)

    fmt = fmtsim.get_format(name)
    known = (SPECIAL, log2_of(fmt.element.max)) if rule == "rceil" else (SPECIAL,)
    return blocks(r, f"MX blocks, {rule}", fmt, theirs, dtypes=(torch.float32, torch.bfloat16), known=known,
                  scale_rule=rule)  # fmt: skip


@peer("torchao")
def torchao_nvfp4(r: Random) -> Comparison:
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scaling = Scaling(block=(1, 16), scale=fmtsim.get_format("e4m3"), arithmetic="reciprocal")
    fmt = BlockFormat(name="nvfp4_one_level", element=fmtsim.get_format("e2m1"), scaling=scaling)

    def theirs(x: Tensor) -> Tensor:
        scales, codes = nvfp4_quantize(x)
        values = f4_unpacked_to_f32(unpack_uint4(codes)).reshape(len(x), -1)
        return torch.cat([values * scales.float().reshape(-1, 1), scales.float().reshape(-1, 1)], 1)

    least: tuple[str, Known] = (
        "scales that are at least 2**-6", lambda x, ours, theirs: (theirs[:, -1:] == 2.0**-6).expand(ours.shape)
    )  # fmt: skip
    return blocks(r, "NVFP4 of one level", fmt, theirs, dtypes=(torch.float32, torch.bfloat16), known=(SPECIAL, least))


# compressed-tensors: casts to FP4, FP6 and float8, integers under given scales, exponents of MX scales.


@peer("compressed_tensors")
def compressed_elements(r: Random) -> Comparison:
    from compressed_tensors.quantization.quant_args import round_to_quantized_type_dtype
    from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
    from compressed_tensors.quantization.utils.fp6_utils import cast_to_fp6

    functions = {"e2m1": cast_to_fp4, "e2m3": cast_to_fp6}
    kinds = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8_full": torch.int8}
    name = r.choice([*functions, *kinds])
    fmt = fmtsim.get_format(name)

    def theirs(x: Tensor) -> Tensor:
        x = x.clone().contiguous()
        y = functions[name](x) if name in functions else round_to_quantized_type_dtype(x, kinds[name])
        return y.float()

    finite = (lambda x: x) if name in ("e4m3", "e5m2") else lambda x: x.nan_to_num(1.0, torch.inf, -torch.inf)
    return element(
        r, f"casts to {name}", fmt, theirs, change=finite, dtypes=(torch.float32, torch.bfloat16), known=(ZERO,)
    )


@peer("compressed_tensors")
def compressed_scales(r: Random) -> Comparison:
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    name, bits = r.choice((("mxfp4", 4), ("mxfp6_e2m3", 6)))
    fmt = fmtsim.get_format(name)
    x = data(r, fmt.element, torch.float32, (ROWS, COLUMNS)).nan_to_num(1.0, 1.0, 1.0)
    x = torch.where(x == 0, 1.0, x).clamp(-(2.0**126), 2.0**126) * 2.0 ** r.randint(-30, 0)
    tiny: tuple[str, Known] = ("exponents below those of E8M0", lambda x, ours, theirs: theirs <= 0)
    return Comparison(
        what="exponents of MX scales", details=name, x=laid_out(r, x, 32), row=32, known=(tiny,),
        ours=lambda x: fmtsim.encode(x, fmt, scale_rule="even").scales.reshape(-1).float(),
        theirs=lambda x: generate_mx_scales(x.abs().amax(-1), bits).float(),
        rule="scale rule 'even'; docs/semantics.md, section 5",
    )  # fmt: skip


# gguf: bfloat16, MXFP4 as it is written, and the values of ggml's blocks.


@peer("gguf")
def gguf_bfloat16(r: Random) -> Comparison:
    from gguf.quants import GGMLQuantizationType, dequantize, quantize

    kind = GGMLQuantizationType.BF16
    theirs = lambda x: torch.from_numpy(dequantize(quantize(x.numpy(), kind), kind).reshape(x.shape))  # noqa: E731
    return element(r, "bfloat16", fmtsim.get_format("bf16"), theirs, overflow="ieee")


@peer("gguf")
def gguf_mxfp4(r: Random) -> Comparison:
    from gguf.quants import GGMLQuantizationType, dequantize, quantize

    kind = GGMLQuantizationType.MXFP4

    def theirs(x: Tensor) -> Tensor:
        with numpy.errstate(all="ignore"):
            stored = quantize(x.numpy(), kind)
        scales = torch.from_numpy(numpy.array(stored.reshape(len(x), -1)[:, :1]))
        return torch.cat([torch.from_numpy(dequantize(stored, kind)), fmtsim.decode(scales, "e8m0").float()], 1)

    known = ZERO, HALFWAY, log2_of(1.0)
    return blocks(r, "MXFP4 as it is written", fmtsim.get_format("mxfp4"), theirs, finite=True, known=known)


@peer("gguf")
def gguf_blocks(r: Random) -> Comparison:
    from gguf.quants import GGMLQuantizationType, dequantize

    fmt = r.choice([fmt for fmt in GGML_FORMATS if fmt.encoder and fmt.name not in ("q1_0", "q2_0")])  # newer than gguf
    kind, row = GGMLQuantizationType[fmt.type], fmt.bytes
    codes = torch.randint(256, (2048, row), generator=torch.Generator().manual_seed(r.getrandbits(32)))

    def ours(x: Tensor) -> Tensor:
        return Encoded(format=fmt, shape=torch.Size((len(x), fmt.elements)), dim=-1, codes=x.to(torch.uint8)).decode()

    return Comparison(what="values of blocks", details=fmt.name, x=codes, row=row, ours=ours, known=(ZERO,),
                      theirs=lambda x: torch.from_numpy(dequantize(x.to(torch.uint8).numpy(), kind)),
                      rule="scale times code, float32; ggml's block types")  # fmt: skip


# MMA-Sim: dot products of matrix instructions, one at a time.

INSTRUCTIONS = [  # unit of fmtsim; architecture, class and qualifier of MMA-Sim; formats; sums
    ("volta.mma", "Volta", "mma", "m8n8k4.{d}.f16.f16.{d}", ("fp16",)),
    ("turing.mma", "Turing", "mma", "m16n8k8.{d}.f16.f16.{d}", ("fp16",)),
    ("ampere.mma", "Ampere", "mma", "m16n8k16.{d}.f16.f16.{d}", ("fp16",)),
    ("ampere.mma", "Ampere", "mma", "m16n8k16.f32.bf16.bf16.f32", ("bf16",)),
    ("ampere.mma", "Ampere", "mma", "m16n8k8.f32.tf32.tf32.f32", ("tf32",)),
    ("ada.mma", "Ada Lovelace", "mma", "m16n8k32.{d}.{a}.{b}.{d}", ("e4m3", "e5m2")),
    ("hopper.wgmma", "Hopper", "wgmma", "m64n8k16.{d}.f16.f16", ("fp16",)),
    ("hopper.wgmma", "Hopper", "wgmma", "m64n8k16.f32.bf16.bf16", ("bf16",)),
    ("hopper.wgmma", "Hopper", "wgmma", "m64n8k8.f32.tf32.tf32", ("tf32",)),
    ("hopper.wgmma", "Hopper", "wgmma", "m64n8k32.{d}.{a}.{b}", ("e4m3", "e5m2")),
    ("rtx_blackwell.mma", "RTX Blackwell", "mma", "m16n8k32.{d}.{a}.{b}.{d}", ("e4m3", "e5m2")),
    ("rtx_blackwell.mma", "RTX Blackwell", "mma", "m16n8k16.{d}.f16.f16.{d}", ("fp16",)),
    ("cdna3.mfma", "CDNA3", "mfma", "f32_16x16x16_f16", ("fp16",)),
    ("cdna3.mfma", "CDNA3", "mfma", "f32_16x16x16_bf16", ("bf16",)),
    ("cdna3.mfma", "CDNA3", "mfma", "f32_16x16x8_xf32", ("tf32",)),
    ("cdna3.mfma", "CDNA3", "mfma", "f32_16x16x32_{a}_{b}", ("e4m3fnuz", "e5m2fnuz")),
]
_AMD_NAMES = {"e4m3fnuz": "fp8", "e5m2fnuz": "bf8"}


@peer("mma_sim", "mmasim")
def mma_sim_dots(r: Random) -> Comparison:
    from mmasim.simulator import amd, nv_ptx

    unit, architecture, kind, qualifier, formats = r.choice(INSTRUCTIONS)
    names = r.choice(formats), r.choice(formats)
    half = "{d}" in qualifier and r.random() < 0.4
    a_name, b_name = (_AMD_NAMES.get(name, name) for name in names)
    qualifier = qualifier.format(d="f16" if half else "f32", a=a_name, b=b_name)
    instruction = getattr(amd if kind == "mfma" else nv_ptx, kind)(architecture, qualifier)
    k, instruction.m, instruction.n = instruction.k, 1, 1
    sums, accumulate = (torch.float16, "fp16") if half else (torch.float32, "fp32")
    elements = [fmtsim.get_format(name) for name in names]
    operands = [
        fmtsim.quantize(data(r, fmt, torch.float32, (48, k)), fmt, overflow="saturate", out_dtype=torch.float32)
        for fmt in elements
    ]
    c = data(r, fmtsim.get_format("fp16"), torch.float32, (48, 1)).to(sums).float() * r.choice((0.0, 1.0, 1.0))

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, addend = x.float().split([k, k, 1], -1)
        return a.to(instruction.a_type), b.to(instruction.b_type), addend.to(sums)

    def ours(x: Tensor) -> Tensor:
        a, b, addend = parts(x)
        operands = a[:, None], b[:, None], addend[:, None]
        tf32 = "tf32" if names[0] == "tf32" else None  # float32 is another format to CDNA3
        return fmtsim.mma(*operands, target=unit, accumulate=accumulate, formats=tf32).reshape(-1)

    def theirs(x: Tensor) -> Tensor:
        a, b, addend = parts(x)
        rows = zip(a[:, None], b[:, :, None], addend[:, None], strict=True)
        return torch.cat([instruction(*row).reshape(1) for row in rows])

    def zeros(x: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
        a, b, addend = x.double().split([k, k, 1], -1)
        largest = torch.cat([a * b, addend], 1).abs().amax(1, keepdim=True)
        return ((a == 0) != (b == 0)).any(1, keepdim=True) | (largest < 2.0**-100)

    known = [("exponents of zeros, which are -126 in MMA-Sim and count", zeros), *[UNVERIFIED] * (kind == "mfma")]
    rule = f"{fmtsim.get_unit(unit).mode(*names, accumulate)}; docs/matmul.md, sections 2 and 3"
    return Comparison(what=unit, details=f"{architecture} {qualifier}", x=torch.cat([*operands, c], 1), ours=ours,
                      theirs=theirs, row=2 * k + 1, rule=rule, known=tuple(known))  # fmt: skip
