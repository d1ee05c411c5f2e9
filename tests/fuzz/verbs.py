"""Targets that take tensors: verbs, products, layers. A result has the bits of the same call on plain copies."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import fmtsim
from fmtsim.errors import FmtsimError, shown
from tests.fuzz import tensors
from tests.fuzz.target import Target

Values = dict[str, Any]


class Call:
    """A call of a verb, drawn from a seed: the same seed gives the same call.

    Args:
        draw: Returns a function, its arguments and its keywords.
        seed: Of the draw.
    """

    def __init__(self, draw: Callable[[Random], tuple[Any, list[Any], Values]], seed: int) -> None:
        self.draw, self.seed = draw, seed

    @functools.cached_property
    def drawn(self) -> tuple[Any, list[Any], Values]:
        """The function, its arguments and its keywords."""
        _compile()
        with torch.random.fork_rng([]), warnings.catch_warnings(action="ignore"):
            return self.draw(Random(self.seed))

    def __repr__(self) -> str:
        function, arguments, keywords = self.drawn
        words = [_shown(value) for value in arguments]
        words += [f"{name}={_shown(value)}" for name, value in keywords.items()]
        return f"seed {self.seed}: {getattr(function, '__name__', function)}({', '.join(words)})"

    def run(self) -> Any:
        """Call, then call again on plain copies, and compare the bits."""
        function, arguments, keywords = self.drawn
        copies = [tensors.plain(value) for value in arguments]
        plain = {name: tensors.plain(value) for name, value in keywords.items()}
        failed = None
        try:
            torch.manual_seed(0)
            result = tensors.bits(function(*arguments, **keywords))
        except FmtsimError as error:
            failed = error
        if failed is not None:
            raise failed
        with contextlib.suppress(FmtsimError):  # what is refused may depend on the kind of tensor, not on its numbers
            torch.manual_seed(0)
            again = tensors.bits(function(*copies, **plain))
            assert result == again, "other bits than on plain copies"


@functools.cache
def _compile() -> None:
    """Have the kernels of products compiled, which takes longer than a call may."""
    for name in UNITS:
        for x in (torch.ones(2, 2, dtype=torch.float16), torch.ones(40, 40, dtype=torch.float16)):
            fmtsim.mm(x, x, unit=name)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return shown(value)
    kind = type(value).__name__ if type(value) is not Tensor else ""
    strides = "" if value.layout != torch.strided or value.is_nested else f" strides {value.stride()}"
    lazy = " negated" if value.layout == torch.strided and value.is_neg() else ""
    size = "nested" if value.is_nested else tuple(value.shape)
    return f"<{kind}{value.dtype} {size}{strides} on {value.device} {value.layout}{lazy} grad {value.requires_grad}>"


def target(
    name: str, count: int, failed: tuple[int, ...] = ()
) -> Callable[[Callable[[Random], Any]], Callable[[Random], Any]]:
    """Register what draws a call as a fuzz target, with the seeds of calls that were defects once."""

    def register(draw: Callable[[Random], Any]) -> Callable[[Random], Any]:
        seeds = st.uuids(version=4).map(lambda drawn: Call(draw, drawn.int >> 64))
        once = tuple(Call(draw, seed) for seed in failed)
        TARGETS.append(Target(f"verb.{name}", seeds, Call.run, once, count=count))
        return draw

    return register


TARGETS: list[Target] = []
FORMATS = (
    "e4m3", "e5m2", "e2m1", "e3m2", "fp16", "bf16", "fp32", "fp64", "tf32", "int8", "int4", "uint4", "int8_half", "nf4",
    "lns8_g8", "e8m0", "mxfp4", "mxfp8_e4m3", "nvfp4", "e4m3_1x128", "e4m3_128x128", "int8_channel", "int4_g32",
    "uint4_g32_zp", "logfmt8", "e4m3_tensor", "p3109_k5p2se", torch.float8_e5m2, torch.bfloat16,
)  # fmt: skip
ROUNDINGS = ("nearest_even", "nearest_away", "nearest_toward_zero", "toward_zero", "up", "down", "to_odd")
UNITS = ("hopper.wgmma", "volta.mma", "blackwell.tcgen05", "exact", "fp32_fma", "cdna3.mfma", "ampere.mma")
RECIPES = ("te_current", "te_block", "te_mxfp8", "te_nvfp4", "te_delayed", "mxfp4", "int8_mixed")


def maybe(r: Random, values: Values, wrong: float = 0.04, **choices: Any) -> Values:
    """Add some keywords of a verb, a few of them wrong; a choice is a tuple of values or a function of the draw."""
    for name, choice in choices.items():
        kind = r.random()
        if kind < wrong:
            values[name] = tensors.junk(r)
        elif kind < 0.25:
            values[name] = choice(r) if callable(choice) else r.choice(choice)
    return values


def either(r: Random, value: Any, wrong: float = 0.03) -> Any:
    """Return a value, or a wrong one in its place."""
    return tensors.junk(r) if r.random() < wrong else value


def _cast(r: Random, x: Any) -> Values:
    like = x.shape if isinstance(x, Tensor) and not x.is_nested else (2,)
    options = maybe(
        r, {}, rounding=ROUNDINGS, overflow=("saturate", "ieee", None), dim=(-2, -1, 0, 1), pad=(True, True, False),
        block_size=(1, 2, 8, 16, 32, (2, 8), (None, None), (1, None), 1 << 40), scale_rule=("floor", "ceil", "amax"),
    )  # fmt: skip
    if r.random() < 0.2:
        options["rounding"] = "stochastic"
        options["generator"] = r.choice((3, fmtsim.RandomKey(1, 2), (1 << 64) - 1, tensors.junk(r)))
        options = maybe(r, options, random_bits=(1, 8, 32))
        if r.random() < 0.3 and isinstance(x, Tensor):
            del options["generator"]
            words = torch.randint(0, 1 << r.choice((1, 8, 31)), like, generator=torch.Generator().manual_seed(1))
            options["random_words"] = tensors.layout(r, words)
    return options


@target("quantize", 200)
def _quantize(r: Random) -> tuple[Any, list[Any], Values]:
    x = either(r, tensors.tensor(r))
    options = _cast(r, x)
    maybe(r, options, out_dtype=tensors.FLOATS)
    if r.random() < 0.2 and isinstance(x, Tensor) and not x.is_nested:
        options["out"] = tensors.tensor(r, of=tuple(x.shape))
    return fmtsim.quantize, [x, either(r, r.choice(FORMATS))], options


@target("quantize_", 120, failed=(11091338831743096163,))
def _quantize_in_place(r: Random) -> tuple[Any, list[Any], Values]:
    x = either(r, tensors.tensor(r))
    return fmtsim.quantize_, [x, either(r, r.choice(FORMATS))], _cast(r, x)


def _encoded(x: Any, format: Any, **options: Any) -> Any:
    q = fmtsim.encode(x, format, **options)
    q.unpacked(), q.nbytes, repr(q)
    return [q.codes, q.scales, q.offsets, q.decode()]


@target("encode", 120, failed=(6279556592387848185,))
def _encode(r: Random) -> tuple[Any, list[Any], Values]:
    x = either(r, tensors.tensor(r))
    return _encoded, [x, either(r, r.choice(FORMATS))], _cast(r, x)


@target("decode", 120)
def _decode(r: Random) -> tuple[Any, list[Any], Values]:
    integers = tuple(dtype for dtype in tensors.OTHERS if not dtype.is_complex)
    codes = either(r, tensors.tensor(r, dtypes=integers))
    return fmtsim.decode, [codes, either(r, r.choice((*FORMATS, None)))], maybe(r, {}, out_dtype=tensors.FLOATS)


@target("Encoded", 80)
def _make(r: Random) -> tuple[Any, list[Any], Values]:
    q = fmtsim.encode(tensors.numbers(r, (4, 32), torch.float32), r.choice(FORMATS), pad=True)
    names = ("format", "shape", "dim", "codes", "scales", "tensor_scale", "offsets")
    fields = {name: either(r, getattr(q, name), 0.1) for name in names}
    for name in ("codes", "scales"):
        if isinstance(fields[name], Tensor) and r.random() < 0.4:
            fields[name] = tensors.layout(r, tensors.numbers(r, tuple(fields[name].shape), fields[name].dtype))

    def make(**fields: Any) -> Any:
        return fmtsim.Encoded(**fields).decode()

    return make, [], fields


@target("compare", 80)
def _compare(r: Random) -> tuple[Any, list[Any], Values]:
    x = either(r, tensors.tensor(r, dtypes=(*tensors.FLOATS, *tensors.OTHERS)))
    same = r.random() < 0.3 or not isinstance(x, Tensor) or x.is_nested
    other = x if same else tensors.tensor(r, dtypes=(x.dtype,), of=x.shape)

    def compare(actual: Any, expected: Any) -> Any:
        text = str(fmtsim.compare(actual, expected))
        return torch.tensor(list(text.encode()))

    return compare, [x, either(r, other)], {}


def _machine(r: Random, options: Values) -> Values:
    kind = r.random()
    if kind < 0.75:
        options["unit"] = either(r, r.choice(UNITS))
    elif kind < 0.9:
        options["target"] = either(r, r.choice(("h200", "a100", "chain")))
    elif kind < 0.96:
        unit = fmtsim.get_unit("hopper.wgmma")
        options["datapath"] = either(r, unit.modes[0].datapath, 0.3)
    return maybe(
        r, options, accumulate=("fp32", "fp16"), allow_tf32=(True, False), native=(False, None), strict=(False,),
        out_dtype=(torch.float32, torch.bfloat16, torch.float8_e4m3fn), plan=(None, fmtsim.GemmPlan(k_tile=16)),
        allow_fp16_accumulation=(True, False), wrong=0.02,
    )  # fmt: skip


def _operands(r: Random, first: tuple[int, ...], second: tuple[int, ...], dtypes: Any = None) -> list[Any]:
    dtype = (r.choice(dtypes or tensors.FLOATS),)
    return [either(r, tensors.tensor(r, dtypes=dtype, of=sizes), 0.02) for sizes in (first, second)]


def _sizes(r: Random) -> tuple[int, int, int]:
    return tuple(r.choice((0, 1, 2, 3, 8, 16, 17, 33)) for _ in range(3))  # type: ignore[return-value]


@target("mm", 120)
def _mm(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    options = _machine(r, {})
    if r.random() < 0.1:
        maybe(r, options, a_format=("e4m3", "e2m1", "int8"), b_format=("e4m3", "e2m1"))
    return fmtsim.mm, _operands(r, (m, k), (k, n)), options


@target("bmm", 48)
def _bmm(r: Random) -> tuple[Any, list[Any], Values]:
    (m, n, k), count = _sizes(r), r.choice((0, 1, 2, 3))
    return fmtsim.bmm, _operands(r, (count, m, k), (count, k, n)), _machine(r, {})


@target("linear", 60, failed=(536551417588828234,))
def _linear(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    lead = r.choice(((m,), (), (2, m), (0, m), (1,) * 6))
    operands = _operands(r, (*lead, k), (n, k))
    if r.random() < 0.3:
        dtype = operands[0].dtype if isinstance(operands[0], Tensor) else torch.float32
        operands.append(either(r, tensors.tensor(r, dtypes=(dtype,), of=(n,)), 0.1))
    return fmtsim.linear, operands, _machine(r, {})


@target("int_mm", 40)
def _int_mm(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    options = maybe(r, {}, unit=("int8", "int8.satfinite"), target=("h200",), native=(False, None))
    return fmtsim.int_mm, _operands(r, (m, k), (k, n), (torch.int8,)), options


@target("scaled_mm", 100, failed=(5381471994509439047,))
def _scaled_mm(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = r.choice((16, 32, 128)), r.choice((16, 32, 128)), r.choice((32, 128, 256))
    dtype = (torch.float8_e4m3fn,)
    a, b = tensors.tensor(r, dtypes=dtype, of=(m, k)), tensors.tensor(r, dtypes=dtype, of=(n, k))
    with contextlib.suppress(RuntimeError, NotImplementedError):
        b = b.t()
    shapes = r.choice((((), ()), ((m, 1), (1, n)), ((m, -(-k // 128)), (-(-k // 128), -(-n // 128)))))
    scales = [tensors.layout(r, tensors.numbers(r, size, torch.float32).abs().nan_to_num(1, 1, 1)) for size in shapes]
    unit = "hopper.wgmma"
    if r.random() < 0.2:
        rows = [
            torch.full((-(-size // 128) * 128 * -(-(k // 32) // 4) * 4,), 127, dtype=torch.uint8) for size in (m, n)
        ]
        scales, unit = [row.view(torch.float8_e8m0fnu) for row in rows], "blackwell.tcgen05.mxf8f6f4"
    options = _machine(r, {"out_dtype": r.choice((torch.bfloat16, torch.float32, torch.float8_e4m3fn))})
    for name in ("allow_tf32", "allow_fp16_accumulation"):
        options.pop(name, None)
    if options.get("unit") in UNITS:
        options["unit"] = unit
    maybe(r, options, bias=lambda r: tensors.tensor(r, dtypes=(torch.bfloat16,), of=(n,)), use_fast_accum=(True, False),
          scale_result=lambda r: torch.tensor(2.0), scale_recipe_a=("TensorWise", "RowWise"),
          scale_recipe_b=("TensorWise", "RowWise"), swizzle_a=("NO_SWIZZLE",))  # fmt: skip
    return fmtsim.scaled_mm, [either(r, value, 0.02) for value in (a, b, *scales)], options


@target("mma", 48, failed=(13141249563587936203, 18421199851013097781))
def _mma(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    operands = _operands(r, (m, k), (n, k), (torch.float16, torch.bfloat16))
    maybe(r, options := {"unit": either(r, r.choice(UNITS))}, accumulate=("fp32", "fp16"),
          c=lambda r: tensors.tensor(r, dtypes=(torch.float32,), of=(m, n)), generator=(None,))  # fmt: skip
    return fmtsim.mma, operands, options


@target(
    "explain",
    60,
    failed=(
        10910207247614510596,
        979473696259143546,
    ),
)
def _explain(r: Random) -> tuple[Any, list[Any], Values]:
    x = r.choice((0.1, -3e5, float("nan"), float("inf"), 5e-324, 7, [1.0, 2.0], tensors.tensor(r), tensors.junk(r)))
    options = _cast(r, x)
    known = inspect.signature(fmtsim.explain).parameters
    options = {name: value for name, value in options.items() if name in known}

    def explain(*arguments: Any, **options: Any) -> None:
        str(fmtsim.explain(*arguments, **options))

    return explain, [x, either(r, r.choice(FORMATS))], options


@target("explain_mm", 32)
def _explain_mm(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)

    def explain_mm(*arguments: Any, **options: Any) -> None:
        str(fmtsim.explain_mm(*arguments, **options))

    known = inspect.signature(fmtsim.explain_mm).parameters
    options = {name: value for name, value in _machine(r, {}).items() if name in known}
    return explain_mm, _operands(r, (m, k), (k, n)), options


def _junk_of(r: Random, function: Callable[..., Any], usual: Values) -> Values:
    """Return good keywords of a function with one or two wrong ones."""
    names = [
        name for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD) and name != "self"
    ]  # fmt: skip
    return usual | {r.choice(names): tensors.junk(r) for _ in range(r.randint(1, 2))}


@functools.cache
def _records() -> tuple[tuple[Any, Values], ...]:
    e4m3, nvfp4 = fmtsim.get_format("e4m3"), fmtsim.get_format("nvfp4")
    quantizer = fmtsim.Quantizer(format=e4m3)
    gemm = fmtsim.Gemm(a=quantizer, b=quantizer)
    datapath = fmtsim.get_unit("hopper.wgmma").modes[0].datapath
    made = [e4m3, nvfp4, nvfp4.scaling, nvfp4.scaling.tensor, quantizer, gemm, datapath, fmtsim.GemmPlan()]
    made += [fmtsim.get_format(name) for name in ("int8", "nf4", "lns8_g8", "logfmt8")]
    made += [
        fmtsim.get_recipe("te_delayed"),
        fmtsim.get_recipe("te_delayed").linear,
        fmtsim.get_ptq_recipe("int4_gptq"),
    ]
    made += [fmtsim.Rounding(), fmtsim.get_unit("volta.mma"), fmtsim.get_unit("volta.mma").modes[0]]
    made += [fmtsim.get_unit("int8").modes[0].datapath, fmtsim.distributed.get_reduction("fp8lm")]
    made += [fmtsim.optim.get_scheme("ao_8bit")]
    return tuple(
        (
            type(record),
            {name: getattr(record, name) for name, field in record.__dataclass_fields__.items() if field.init},
        )
        for record in made
    )


@target("records", 160, failed=(6320070982582618411,))
def _record(r: Random) -> tuple[Any, list[Any], Values]:
    cls, fields = r.choice(_records())

    def record(**fields: Any) -> None:
        str(cls(**fields)), repr(cls(**fields))

    record.__name__ = cls.__name__
    return record, [], fields | {r.choice(list(fields)): tensors.junk(r) for _ in range(r.randint(1, 2))}


def _net(r: Random) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=r.random() < 0.5))


def _trained(model: Any, recipe: Any, x: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    converted = fmtsim.convert(model, recipe, **options)
    y = converted(x)
    if isinstance(y, Tensor) and y.requires_grad and y.numel():
        y.sum().backward()
    str(fmtsim.report(converted))
    return y


class Passed(FmtsimError):
    """What a function that was passed raised itself, which reaches the caller."""


def _passed(value: Any) -> Any:
    """Return a function whose own errors are known as such; other values as they are."""
    if not callable(value):
        return value

    @functools.wraps(value)
    def function(*arguments: Any) -> Any:
        try:
            return value(*arguments)
        except Exception as error:
            raise Passed(f"a function that was passed raised {error!r}") from error

    return function


@target(
    "convert",
    24,
    failed=(
        12197491323643380526,
        7176390565075237793,
        7701471196422413632,
        2616203623287572904,
    ),
)
def _convert(r: Random) -> tuple[Any, list[Any], Values]:
    model = either(r, _net(r), 0.05)
    x = either(r, tensors.tensor(r, dtypes=(torch.float32,), of=(*r.choice(((3,), (2, 3), (0,), ())), 64)), 0.05)
    options = maybe(
        r, {}, filter_fn=(lambda module, name: True, lambda module: True, lambda module, name: name == "0"), unit=UNITS,
        target=("h200",), seed=(1,), total_steps=(10,), wrong=0.05,
    )  # fmt: skip
    known = inspect.signature(fmtsim.convert).parameters
    options = {name: value for name, value in options.items() if name in known}
    if "filter_fn" in options:
        options["filter_fn"] = _passed(options["filter_fn"])
    return _trained, [model, _passed(either(r, r.choice(RECIPES), 0.1)), x], options


@target("models", 48)
def _models(r: Random) -> tuple[Any, list[Any], Values]:
    """Verbs that take a model, or a state."""
    model = fmtsim.convert(_net(r), "te_delayed") if r.random() < 0.8 else _net(r)
    verb = r.choice(
        (fmtsim.report, fmtsim.revert, fmtsim.recipe_state, fmtsim.observe, fmtsim.set_step, fmtsim.load_recipe_state,
         fmtsim.share_scales, fmtsim.ptq_state, fmtsim.load_ptq, fmtsim.ptq_report, fmtsim.ptq)
    )  # fmt: skip
    extra = len([p for p in inspect.signature(verb).parameters.values() if p.default is p.empty and p.kind < 2]) - 1
    arguments = [either(r, model, 0.3), *(tensors.junk(r) for _ in range(extra))]
    if verb is fmtsim.load_recipe_state and r.random() < 0.7:
        state = fmtsim.recipe_state(fmtsim.convert(_net(r), "te_delayed"))
        if r.random() < 0.7:
            state[r.choice(list(state))] = tensors.junk(r)
        arguments[1] = state

    def run(*arguments: Any) -> None:
        verb(*arguments)

    run.__name__ = verb.__name__
    return run, arguments, {}


@target(
    "optim",
    60,
    failed=(
        5967740723652819025,
        7456155837302684848,
        9507376488933642206,
        13344685260146688598,
    ),
)
def _optim(r: Random) -> tuple[Any, list[Any], Values]:
    cls = r.choice((fmtsim.optim.AdamW, fmtsim.optim.SGD, fmtsim.optim.Lion, fmtsim.optim.Madam, fmtsim.optim.Adam))
    count = r.randint(1, 2)
    like = [tensors.numbers(r, tensors.shape(r), r.choice(tensors.FLOATS[:3])) for _ in range(count)]
    params = [either(r, nn.Parameter(x), 0.03) for x in like]
    grads = [either(r, tensors.tensor(r, dtypes=(x.dtype,), of=tuple(x.shape)), 0.03) for x in like]
    options = _junk_of(r, cls, {}) if r.random() < 0.4 else {}
    options.pop("params", None)
    params = either(r, params, 0.03)

    def step(params: Any, grads: Any, **options: Any) -> None:
        optimizer = cls(params, **options)
        for p, g in zip(params, grads, strict=False):
            with contextlib.suppress(RuntimeError, TypeError, AttributeError):  # torch's own, of the assignment
                p.grad = g
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())

    step.__name__ = cls.__name__
    return step, [params, grads], options


@target(
    "simulate",
    40,
    failed=(
        13561687937344582101,
        13833619380342911950,
        9810141142777416071,
    ),
)
def _simulate(r: Random) -> tuple[Any, list[Any], Values]:
    size = tensors.shape(r)
    lists = either(r, [tensors.tensor(r, dtypes=(torch.float32,), of=size) for _ in range(r.randint(0, 4))], 0.05)
    return (
        fmtsim.distributed.simulate,
        [lists, either(r, r.choice(list(fmtsim.distributed.REDUCTIONS)), 0.1)],
        maybe(r, {}, **{name: (None,) for name in list(inspect.signature(fmtsim.distributed.simulate).parameters)[2:]}),
    )


@target("lists", 48, failed=(12907709263244304841,))
def _lists(r: Random) -> tuple[Any, list[Any], Values]:
    """Verbs that take names and records."""
    verb = r.choice(
        (fmtsim.get_format, fmtsim.list_formats, fmtsim.register_format, fmtsim.get_unit, fmtsim.register_unit,
         fmtsim.get_target, fmtsim.get_recipe, fmtsim.register_recipe, fmtsim.get_ptq_recipe, fmtsim.linear_config,
         fmtsim.optim.get_scheme, fmtsim.distributed.get_reduction, fmtsim.set_num_threads, fmtsim.Encoded.load)
    )  # fmt: skip
    known = inspect.signature(verb).parameters
    names = [name for name, p in known.items() if p.kind in (1, 3)]
    given = [name for name in names if known[name].default is inspect.Parameter.empty or r.random() < 0.3]
    return verb, [], {name: tensors.junk(r) for name in given}
