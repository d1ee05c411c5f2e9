# SPDX-License-Identifier: Apache-2.0
"""Hold a GPU to the plan file and book that describe it: native bits against emulated ones."""

import dataclasses
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.formats.interop import dtype_name, torch_dtype
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.matmul import bmm, int_mm, linear, mm
from fmtsim.gemm.products.scaled_mm import scaled_mm
from fmtsim.gemm.targets.kernel import Rule
from fmtsim.gemm.targets.planfile import Book, Family
from fmtsim.gemm.targets.question import Choice, Kind, Question, question_call
from fmtsim.gemm.targets.target import Target
from fmtsim.lab.analysis.compare import Comparison
from fmtsim.lab.analysis.compare_native import compare_native
from fmtsim.lab.explain.samples import STORED
from fmtsim.lab.verify.probe_operands import spread
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import Basis
from fmtsim.support.errors import FmtsimError, first_line
from fmtsim.support.progress import Progress
from tools.calibrate.book import question

KINDS = ("wide", "special")
DATA = ("normal", *KINDS, "tiny", "whole")
"""Kinds of data: normal numbers; numbers far apart, which cancel; NaN, Inf, -0 and subnormals among those; results that
are subnormal or zero; whole numbers, whose sums are exact."""
SAMPLE = 64  # questions of an algorithm that are drawn from a book, of which calls are taken
WORK = 1 << 35  # products of one call that are emulated
# Sizes that are tried for rules without a table of their own.
SIZES = ((64, 96, 512), (128, 64, 1024), (100, 60, 304), (33, 65, 129), (16, 64, 8192), (1, 768, 1024), (768, 1, 1024),
         (17, 24, 40), (48, 48, 640), (256, 512, 2048))  # fmt: skip
SPECIALS = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -(2.0**-133), 3e38, 2.0**-16)
_RECIPES = {"block_128": ("BlockWise1x128", "BlockWise128x128"), "row_block_128": ("BlockWise1x128", "BlockWise1x128")}
_RESULTS = {"bf16": ("bf16", "fp32"), "fp16": ("fp16", "fp32"), "int8": ("int32",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCheck:
    """What came of a rule's calls, or of those that the book has for an algorithm."""

    number: int | None  # place of the rule in the plan file, None for the book
    basis: Basis  # the evidence for the plans
    kernel: str  # name of the kernel
    when: dict[str, Any]  # conditions on the calls
    calls: int  # calls that ran both ways
    outputs: int  # numbers compared
    mismatches: int  # of these, how many differ
    note: str = ""  # the first difference, or why nothing could be compared


def recheck(
    target: Target, device: torch.device, *, calls: int = 3, work: int = WORK, seed: int = 0,
    compare: Callable[..., Comparison] = compare_native, progress: Progress | None = None,
) -> Iterator[RuleCheck]:  # fmt: skip
    """Run calls of every rule, and of every algorithm in the book, natively and emulated.

    Data show rounding, and have NaN, Inf and subnormals.

    Args:
        target: The target; guesses are left out, because they claim nothing.
        device: Its GPU.
        calls: Of every rule; sizes are spread over those that it knows.
        work: Largest M N K of a call; a rule of larger ones alone has its smallest tried.
        seed: Of the data.
        compare: ``fmtsim.lab.compare_native``, or what stands in for it.
        progress: Told how far it is.
    """
    progress = progress or Progress()
    progress.stage("rules", len(target.rules))
    for number, rule in enumerate(target.rules):
        progress.step(number, f"rule {number}, {rule.kernel}")
        if rule.basis != "guess":
            ran = _ran(target, chosen_calls(target, number, calls, work), device, seed + number, compare)
            yield RuleCheck(number=number, basis=rule.basis, kernel=rule.kernel, when=rule.when, **ran)
    groups = list(book_calls(target, calls, work, seed))
    progress.stage("book", len(groups))
    for number, (name, when, chosen) in enumerate(groups):
        progress.step(number, name)
        ran = _ran(target, chosen, device, seed + number, compare)
        yield RuleCheck(number=None, basis="reported", kernel=name, when=when, **ran)


def book_calls(
    target: Target, count: int, work: int, seed: int
) -> Iterator[tuple[str, dict[str, Any], list[GemmCall]]]:
    """Yield algorithms that a target's book names for a kind and layout, with conditions and a few calls of each.

    Calls lie where a run begins or ends, whose neighbours have another choice. Orders that are not known are left out.
    """
    groups: dict[tuple[Kind, int, int, bool], list[Question]] = defaultdict(list)
    seen, rng = Counter[Any](), random.Random(seed)
    for family, size, choice in _edges(target.books):
        asked = question(family, size)
        if asked.m * asked.n * asked.k * asked.batch <= work:
            key = family.kind, family.layout, choice.algorithm, choice.split != 1
            seen[key] += 1  # a sample of all, however many there are
            place = rng.randrange(seen[key])
            if len(groups[key]) < SAMPLE:
                groups[key].insert(place, asked)
            elif place < SAMPLE:
                groups[key][place] = asked
    for (kind, layout, algorithm, split), questions in sorted(groups.items(), key=str):
        calls = (call for call in map(question_call, questions) if _possible(call))
        chosen = list(islice((call for call in calls if target.find(call).basis == "reported"), count))
        if chosen:
            facts = {name: getattr(chosen[0], name) for name in ("operation", "a", "b", "scaling", "bias")}
            when = facts | {"out": get_format(kind.out).name, "layout": layout}
            yield f"algorithm {algorithm}{', split' if split else ''}", when, chosen


def _edges(books: Iterable[Book]) -> Iterator[tuple[Family, int, Choice]]:
    """Yield the sizes at which the choices of the families of books begin and end."""
    for family in itertools.chain.from_iterable(book.families() for book in books):
        for (first, choice), (beyond, _) in zip(family.runs, [*family.runs[1:], (0, None)], strict=True):
            for size in sorted({first, max(first, beyond - family.step)} if choice is not None else ()):
                yield family, size, choice  # type: ignore[misc]


def chosen_calls(target: Target, number: int, count: int, work: int) -> list[GemmCall]:
    """Return calls that fall under a rule, are not guesses, spread by size up to ``work`` products."""
    rule = target.rules[number]
    forms = list(_forms(rule))
    sizes = sorted(dict.fromkeys(_sizes(rule)), key=math.prod)
    sizes = [size for size in sizes if math.prod(size) <= work] or sizes[:count]
    for some in (_spread(sizes, max(4 * count, len(SIZES))), sizes):  # all, where rules before it take those
        calls = (dataclasses.replace(form, m=m, n=n, k=k) for form, (m, n, k) in product(forms, some))
        choices = ((call, target.find(call)) for call in calls if _possible(call))
        chosen = [call for call, choice in choices if choice.rule == number and choice.basis != "guess"]
        if chosen:
            break
    return _spread(sorted(chosen, key=lambda call: (call.m * call.n * call.k, call.k)), count)


def _possible(call: GemmCall) -> bool:
    if call.operation == "scaled_mm":
        return call.k % 16 == call.n % 16 == 0
    return call.operation != "int_mm" or (call.m > 16 and call.k % 8 == call.n % 8 == 0)


def _spread(members: list[Any], count: int) -> list[Any]:
    """Return some members at equal distances, the first and the last among them."""
    if len(members) <= count:
        return members
    return [members[round(i * (len(members) - 1) / max(count - 1, 1))] for i in range(count)]


def _sizes(rule: Rule) -> Iterable[tuple[int, int, int]]:
    if isinstance(rule.split, dict):
        for outer, row in rule.split.items():
            m, n = map(int, outer.split("x"))
            for k in row:
                yield m, n, int(k)
        return
    fixed = {name: rule.when[name] for name in "mnk" if isinstance(rule.when.get(name), int)}
    for size in SIZES:
        m, n, k = (fixed.get(name, value) for name, value in zip("mnk", size, strict=True))
        yield m, n, k


def _forms(rule: Rule) -> Iterator[GemmCall]:
    """Yield a call, without its sizes, for every operation, operand format, result and layout that a rule names."""
    when = rule.when
    several = lambda name, default: value if isinstance(value := when.get(name, default), list) else [value]  # noqa: E731
    operations = several("operation", "int_mm" if when.get("a") == "int8" else "mm")
    names = several("a", ["bf16", "fp16", "tf32", "e4m3"])
    for operation, a, fast in product(operations, names, several("fast_accum", True)):
        scaled = operation == "scaled_mm"
        pairs = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")] if scaled else [(a, a)]
        bias = bool(when.get("bias", False)) and operation != "mm"
        usual = _RESULTS.get(a, ("bf16", "fp32") if scaled else ("fp32",))
        results = several("out", list(usual[:1] if bias else usual))
        layouts = product(several("a_layout", "row"), several("b_layout", "row"))
        for (x, y), out, (a_layout, b_layout) in product(pairs, results, layouts):
            if x != a or (scaled and y not in several("b", y)):
                continue
            yield GemmCall(
                operation=operation, m=1, n=1, k=1, a=x, b=y, out=_dtype(out), fast_accum=fast, bias=bias,
                accumulate=when.get("accumulate", "int32" if a == "int8" else "fp32"),
                scaling=when.get("scaling", "tensor" if scaled else "none"), a_layout=a_layout, b_layout=b_layout,
                batch=2 if operation == "bmm" else 1,
            )  # fmt: skip


def _dtype(name: str) -> torch.dtype:
    dtype = torch.int32 if name == "int32" else torch_dtype(get_format(name))  # type: ignore[arg-type]
    assert dtype is not None  # results of a library are torch's
    return dtype


def _ran(
    target: Target, calls: list[GemmCall], device: torch.device, seed: int, compare: Callable[..., Comparison]
) -> dict[str, Any]:  # fmt: skip
    """Return how many calls ran, how many numbers were compared, how many of them differ, and where."""
    ran = outputs = mismatches = 0
    note, refused = "", "" if calls else "no call falls under this rule"
    for call in calls:
        try:
            for kind in KINDS if call.a != "int8" else KINDS[:1]:
                result = compared(compare, target, call, kind, device, seed)
                outputs, mismatches = outputs + result.count, mismatches + result.mismatches
                if not result.equal and not mismatches - result.mismatches:
                    note = f"{shown(call)}, {kind} data: {result.first}"
            ran += 1
        except (FmtsimError, RuntimeError) as error:
            refused = f"{shown(call)}: {first_line(error)}"
    return {"calls": ran, "outputs": outputs, "mismatches": mismatches, "note": note or ("" if ran else refused)}


def shown(call: GemmCall) -> str:
    """Return a call in a few words."""
    out = dtype_name(call.out)
    return f"{call.operation} {call.m}x{call.n}x{call.k} {call.a} {call.b} {out} {call.a_layout} {call.b_layout}"


def compared(
    compare: Callable[..., Comparison], target: Target, call: GemmCall, kind: str, device: torch.device, seed: int
) -> Comparison:
    """Run a call natively and emulated on data of a kind, and compare the bits."""
    generator = torch.Generator(device).manual_seed(seed)
    a = make_operand(call, call.m, call.a, call.a_layout, kind, generator)
    b = make_operand(call, call.n, call.b, call.b_layout, kind, generator)
    draw = lambda *shape: torch.rand(*shape, generator=generator, device=device) + 0.3  # noqa: E731
    options: dict[str, Any] = {"target": target}
    if call.operation == "int_mm":
        return compare(int_mm, a, b.mT, **options)
    options["out_dtype"] = call.out
    bias = (draw(call.n) - 0.8).to(call.out) if call.bias else None
    if call.operation == "scaled_mm":
        scales = make_scales(call, draw)
        options["scale_recipes"] = _RECIPES.get(call.scaling)
        return compare(scaled_mm, a, b.mT, *scales, bias=bias, use_fast_accum=call.fast_accum, **options)
    options["allow"] = "tf32" if call.a == "tf32" else "fp16_accumulation" if call.accumulate == "fp16" else None
    if call.operation == "linear":
        return compare(linear, a, b, bias, **options)
    return compare(bmm if call.operation == "bmm" else mm, a, b.mT, **options)


def make_scales(call: GemmCall, draw: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Return the scales of a scaled_mm of tensors, rows or blocks of 128, in torch's shapes."""
    if call.scaling == "row":
        return draw(call.m, 1), draw(1, call.n)
    if call.scaling == "tensor":
        return draw(1), draw(1)
    rows_per_scale = 1 if call.scaling == "row_block_128" else 128
    groups = -(-call.k // 128)
    return draw(call.m, groups), draw(groups, -(-call.n // rows_per_scale))


def make_operand(call: GemmCall, rows: int, fmt: str, layout: str, kind: str, generator: torch.Generator) -> Tensor:
    """Return [rows, K], or [batch, rows, K], of one of the kinds of ``DATA``."""
    shape = (rows, call.k) if call.batch == 1 else (call.batch, rows, call.k)
    device = generator.device
    if fmt == "int8":
        return torch.randint(-128, 128, shape, generator=generator, device=device, dtype=torch.int8)
    x = spread(shape, (-3, 4) if kind in KINDS else (0, 1), generator, torch.float32)
    if kind == "tiny":  # products of float16 lie around its least subnormal, 2^-24
        x *= {"fp16": 2.0**-11, "bf16": 2.0**-66, "tf32": 2.0**-66}.get(fmt, 2.0**-4)
    elif kind == "whole":
        x = x.mul_(2).round_().clamp_(-8, 8)
    elif kind != "normal":  # the second half of every other row is its first half, negated and a little larger
        half = x.shape[-1] // 2
        x[..., 1::2, half : 2 * half] = -x[..., 1::2, :half] * (1 + 2.0**-6)
    if kind == "special":
        x[..., ::3, :] *= 2.0**-14
        positions = torch.arange(len(SPECIALS), device=device) * 7
        values = torch.tensor(SPECIALS, device=device)
        x[..., positions % rows, positions % call.k] = values
    if STORED[fmt].itemsize == 1:  # torch's casts to FP8 differ between versions and devices
        x = quantize(x, fmt, overflow="ieee")
    x = x.to(STORED[fmt])
    if layout == "row":
        return x
    return x.mT.contiguous().mT
