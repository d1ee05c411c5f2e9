"""Random products for the torch engine: adversarial operands, units and plans, and the oracle's answer to them."""

import math
from dataclasses import dataclass
from random import Random

import torch

from fmtsim.errors import ArgumentError
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.products.oracle import gemm_oracle
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import FP32, TERM_ROUNDINGS, Arithmetic, Datapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.torch_engine import gemm

NAN = {torch.float32: 0x7FFFFFFF, torch.float64: 0x7FFFFFFFFFFFFFFF}
BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.int32: torch.int32}
DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "e2m1": torch.float32,
    "e4m3fnuz": torch.float16,
}
OPERANDS = [("bf16", "bf16"), ("fp16", "fp16"), ("e4m3", "e4m3"), ("e4m3", "e5m2"), ("tf32", "tf32"), ("fp32", "fp32"),
            ("fp64", "fp64"), ("e2m1", "e2m1"), ("e4m3fnuz", "e4m3fnuz"), ("fp32", "fp64")]  # fmt: skip
KINDS = ("fused", "exact", "chain", "scaled", "grouped", "two_stage", "pairwise")


def custom(name: str, exponent_bits: int, mantissa_bits: int, **more) -> FloatFormat:
    return FloatFormat(name=name, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, **more)


ACCUMULATORS = [FP32, FP32, FP32, get_format("fp16"), get_format("bf16"), get_format("fp64"), custom("e8m13", 8, 13),
                custom("e5m3", 5, 3), custom("e11m20", 11, 20), custom("e8m40", 8, 40)]  # fmt: skip
ODD_ACCUMULATORS = [*(get_format(name) for name in ("e4m3", "e5m2", "e2m1", "e4m3fnuz")),
                    custom("top", 5, 4, nan="top", infinities=False),
                    custom("bare", 5, 4, nan="none", infinities=False),
                    custom("flush", 5, 4, has_subnormals=False), custom("flush32", 8, 23, has_subnormals=False),
                    custom("flush42", 11, 30, has_subnormals=False), custom("powers", 5, 0, nan="top"),
                    custom("wide", 10, 52, nan="top", infinities=False)]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Hold one product: its definition and its tensors."""

    spec: GemmSpec
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None
    scale_a: torch.Tensor | None
    scale_b: torch.Tensor | None
    key: RandomKey | None

    @property
    def dtype(self) -> torch.dtype:
        return out_dtype(self.spec.datapath)


def out_dtype(path: Arithmetic) -> torch.dtype:
    accumulator = path.accumulator if isinstance(path, Datapath) else FP32
    return torch.float32 if is_representable(accumulator, torch.float32) else torch.float64


def engine_bits(case: Case, device: str = "cpu") -> torch.Tensor:
    """Return the bits of the engine's result, on the CPU."""
    out = torch.empty(case.a.shape[0], case.b.shape[0], dtype=case.dtype, device=device)
    moved = (None if t is None else t.to(device) for t in (case.a, case.b, case.c, case.scale_a, case.scale_b))
    gemm(*moved, case.spec, case.key, out)
    return out.cpu().view(BITS[case.dtype])


def oracle_bits(case: Case) -> torch.Tensor | None:
    """Return the bits of the oracle's result, None where it refuses the case."""
    a, b, c, scale_a, scale_b = (
        None if t is None else t.to(torch.float64).tolist()
        for t in (case.a, case.b, case.c, case.scale_a, case.scale_b)
    )
    try:
        rows = gemm_oracle(a, b, case.spec, c=c, scale_a=scale_a, scale_b=scale_b, random=case.key)
    except ArgumentError:
        return None
    values = torch.tensor(rows, dtype=torch.float64).reshape(case.a.shape[0], case.b.shape[0]).to(case.dtype)
    return torch.where(torch.isnan(values), NAN[case.dtype], values.view(BITS[case.dtype])).to(BITS[case.dtype])


def value(r: Random, fmt: FloatFormat, special: float) -> float:
    """Return a value of a format: zeros, the ends of its range, powers of two and their neighbours, NaN and Inf."""
    chance = r.random()
    if chance < 0.12:
        return r.choice([0.0, -0.0 if fmt.has_negative_zero else 0.0])
    if chance < 0.12 + special:
        if fmt.has_nan and r.random() < 0.4:
            return math.nan
        return r.choice([1, -1]) * math.inf if fmt.infinities else fmt.max
    bits, low = fmt.mantissa_bits, fmt.min_exponent - (fmt.mantissa_bits if fmt.has_subnormals else 0)
    ranges = [(low, fmt.max_exponent), (-3, 3), (low, fmt.min_exponent + 2), (fmt.max_exponent - 3, fmt.max_exponent)]
    exponent = max(min(r.randint(*r.choice(ranges)), fmt.max_exponent), low)
    fraction = r.choice([0, 1, (1 << bits) - 1, 1 << max(bits - 1, 0), r.randrange(1 << bits)]) & ((1 << bits) - 1)
    significand = (1 << bits) + fraction
    if exponent < fmt.min_exponent:
        significand, exponent = max(1, significand >> (fmt.min_exponent - exponent)), fmt.min_exponent
    size = min(math.ldexp(significand, exponent - bits), fmt.max)
    return size if not fmt.signed or r.random() < 0.5 else -size


def matrix(r: Random, rows: int, columns: int, fmt: FloatFormat, special: float, dtype: torch.dtype) -> torch.Tensor:
    numbers = [[value(r, fmt, special) for _ in range(columns)] for _ in range(rows)]
    return torch.tensor(numbers, dtype=torch.float64).reshape(rows, columns).to(dtype)


def fused(r: Random, kind: str, accumulators: list[FloatFormat]) -> Datapath:
    """Return a fused unit of a kind."""
    mode = r.choice(["toward_zero", "nearest_even", *MODES])
    rounding = Rounding(mode=mode)
    if mode == "stochastic":
        bits = r.choice([8, 13, 16])
        choices = [Rounding(mode=mode, random_bits=r.choice([None, bits, 1, 31]), variant=v) for v in ("a", "b", "c")]
        rounding = r.choice([*choices, Rounding(mode=mode, random_bits=bits, layout="cvt_rs")])
    fields = {
        "rounding": rounding,
        "accumulator": r.choice(accumulators),
        "signed_zero": r.random() < 0.4,
        "term_rounding": r.choice(TERM_ROUNDINGS),
        "fraction_bits": r.choice([None, 0, 3, 13, 23, 24, 25, 25, 35, 48, 60, 100, 10**6]),
        "min_exponent": r.choice([None, None, -1000, -133, -21, -10, 0, 5, 40]),
        "block": r.choice([None, 1, 2, 3, 4, 8, 16, 32]),
    }
    if kind == "chain":
        fields |= {"block": 1, "fraction_bits": None, "signed_zero": r.random() < 0.7}
    elif kind == "exact":
        fields |= {"block": r.choice([None, None, 2, 4]), "fraction_bits": None}
    elif kind == "scaled":
        scale = get_format(r.choice(["e8m0", "e4m3", "bf16"]))
        fields |= {"scale": scale, "scale_block": r.choice([3, 4, 8, 16])}
    elif kind == "grouped":
        group = r.choice([2, 4, 8])
        fields |= {"group": group, "block": group * r.choice([1, 2, 4])}
        if r.random() < 0.85:
            fields |= {"scale": get_format(r.choice(["e8m0", "e4m3"])), "scale_block": group * r.choice([1, 2])}
    else:
        if fields["block"] and r.random() < 0.25:
            fields["paired"] = True
        if r.random() < 0.25:
            fields["operand"] = get_format(r.choice(["fp16", "bf16", "e4m3", "e5m2"]))
        if r.random() < 0.25:
            window = 2 * fields["block"] if "paired" in fields else 1
            fields["promote_every"] = window * r.choice([1, 2, 4, 8])
            fields["promotion"] = r.choice([None, *accumulators])
    return Datapath(**fields)


def unit(r: Random, kind: str, accumulators: list[FloatFormat]) -> Arithmetic:
    if kind == "two_stage":
        return TwoStageDatapath(
            block=r.choice([2, 4, 8, 16]),
            parity=r.random() < 0.4,
            fraction_bits=r.choice([24, 24, 10]),
            sum_bits=r.choice([31, 31, 20]),
        )
    return PairwiseDatapath(block=r.choice([1, 2, 4])) if kind == "pairwise" else fused(r, kind, accumulators)


def plan(r: Random, path: Arithmetic) -> GemmPlan:
    fields = {"reduce": r.choice(["serial", "pairwise", "in_place"])}
    if r.random() < 0.5:
        fields |= {"k_tile": r.choice([4, 5, 8, 16]), "split": r.randint(1, 5), "residue_first": r.random() < 0.3}
        if r.random() < 0.2:
            fields["part_k"] = r.choice([3, 6, 8, 13])
        else:
            fields["owner"] = r.choice(["contiguous", "interleaved"])
    if r.random() < 0.2:
        fields["instruction_k"] = r.choice([1, 2, 4, 8])
    if r.random() < 0.3 and getattr(path, "promote_every", None) is None:
        fields["promote_every"] = r.choice([4, 8, 16])
        fields["scaled_promotion"] = r.random() < 0.5 and getattr(path, "scale", None) is None
        fields["successive_scales"] = fields["scaled_promotion"] and r.random() < 0.5
    if r.random() < 0.3:
        fields["partial"] = get_format(r.choice(["bf16", "fp16", "fp32", "fp64", "e4m3", "e2m1"]))
        fields["round_trip"] = fields["reduce"] != "in_place" and r.random() < 0.5
    return GemmPlan(**fields)


def case(
    r: Random, kind: str, accumulators: list[FloatFormat] = ACCUMULATORS, special: float = 0.01, largest: int = 4
) -> Case:
    """Return a random product of up to ``largest`` x ``largest`` outputs and 40 products each."""
    operands = OPERANDS[:6] if kind == "two_stage" else OPERANDS
    names = r.choice(operands)
    path = unit(r, kind, accumulators)
    order = plan(r, path) if r.random() < 0.5 else GemmPlan()
    m, n, k = r.randint(1, largest), r.randint(1, largest), r.choice([0, 1, 2, 3, 5, 8, 12, 16, 20, 33, 40])
    formats = [get_format(name) for name in names]
    a, b = (matrix(r, rows, k, fmt, special, DTYPES[name])
            for rows, fmt, name in zip((m, n), formats, names, strict=True))  # fmt: skip
    if r.random() < 0.4 and k > 1:  # neighbours cancel
        a[:, 1::2] = -a[:, : k - k % 2 : 2].to(torch.float64)
        b[:, 1::2] = b[:, : k - k % 2 : 2]
    spec = GemmSpec(datapath=path, plan=order, a=formats[0], b=formats[1])
    accumulator = path.accumulator if isinstance(path, Datapath) else FP32
    c = matrix(r, m, n, accumulator, special, out_dtype(path)) if r.random() < 0.5 else None
    scales: list[torch.Tensor | None] = [None, None]
    if getattr(path, "scale", None) is not None:
        scales = [matrix(r, rows, -(-k // path.scale_block), path.scale, special, torch.float32) for rows in (m, n)]
        if not path.scale.has_zero:
            scales = [torch.where(s == 0, 1.0, s) for s in scales]
    elif order.scaled_promotion:
        scales = [matrix(r, rows, -(-k // order.promote_every), FP32, special, torch.float32) for rows in (m, n)]
    stochastic = isinstance(path, Datapath) and path.rounding.mode == "stochastic"
    key = RandomKey(r.getrandbits(64), r.getrandbits(64)) if stochastic else None
    return Case(spec, a, b, c, scales[0], scales[1], key)
