# SPDX-License-Identifier: Apache-2.0
"""Casts that torch.compile makes one kernel of: the bits of torch operations, on the CPU's compiler and on a GPU."""

import shutil
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fmtsim import torch_engine
from fmtsim.formats.packing import code_dtype
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.rounding.philox import random_word
from fmtsim.spec.cast import RandomKey
from fmtsim.torch_engine import compiled
from fmtsim.torch_engine.philox import in_order
from tests.support.bits import assert_same_bits
from tests.support.casts import cast_spec
from tests.support.operands import wide_with_specials

pytestmark = pytest.mark.usefixtures("one_thread")
ELEMENTS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "e8m0", "fp16", "bf16", "tf32", "int8")
KEY = RandomKey((1 << 40) + 77, (1 << 63) + 2)
CASTS = [(name, mode) for name in ELEMENTS for mode in ("nearest_even", "stochastic")]
MORE = [("e4m3", mode) for mode in MODES] + [("int8", mode) for mode in MODES] + [("e4m3fnuz", "nearest_even")]
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler")


@pytest.fixture
def here(monkeypatch):
    """Let the CPU be a GPU that torch.compile serves, small tensors large, and graphs run as they were traced."""
    monkeypatch.setattr(compiled, "compiles_casts", lambda kind: True)
    monkeypatch.setattr(compiled, "LEAST", 1)
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    compiled.compiled.cache_clear(), compiled.drawn.cache_clear()
    yield monkeypatch
    compiled.compiled.cache_clear(), compiled.drawn.cache_clear()


def key_for(mode: str) -> RandomKey | None:
    return KEY if mode == "stochastic" else None


def results(x: torch.Tensor, spec, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what torch operations make of a cast, and what a compiled one does."""
    expected, found = (torch.zeros(x.shape, dtype=out_dtype) for _ in "ab")
    key = key_for(spec.rounding.mode)
    if out_dtype.is_floating_point:
        torch_engine.quantize(x, spec, key, expected)
    else:
        expected = torch_engine.encode(x, spec, key).codes
    assert compiled.cast(x, spec, key, found)
    return found, expected


@pytest.mark.parametrize(("name", "mode"), [
    ("e2m1", "nearest_even"), ("int8", "up"), *(pytest.param(*cast, marks=pytest.mark.slow) for cast in CASTS + MORE)
])  # fmt: skip
def test_graphs_have_the_bits_of_torch_operations(name, mode, here):
    """A graph serves all sizes."""
    spec = cast_spec(name, Rounding(mode=mode))
    f32, bf16, codes = torch.float32, torch.bfloat16, code_dtype(spec.format.bits)
    for rows, dtype, out in ((3, f32, f32), (7, f32, f32), (3, bf16, bf16), (3, f32, codes)):
        x = wide_with_specials(rows, 171, seed=rows).to(dtype)
        assert_same_bits(*results(x, spec, out), x)
    assert compiled.compiled.cache_info().misses == 3  # one for each pair of dtypes


@pytest.mark.slow
def test_words_of_few_bits_and_in_the_layout_of_blackwell(here):
    x = wide_with_specials(5, 171, seed=5)
    for how in ({"random_bits": 3, "variant": "c"}, {"random_bits": 8, "layout": "cvt_rs"}):
        assert_same_bits(*results(x, cast_spec("e4m3", Rounding(mode="stochastic", **how)), torch.float32), x)


def test_a_tensor_is_cast_in_place(here):
    x = wide_with_specials(3, 171, seed=1)
    spec, expected = cast_spec("e4m3"), torch.empty_like(x)
    torch_engine.quantize(x, spec, None, expected)
    assert compiled.cast(x, spec, None, x)
    assert_same_bits(x, expected)


def test_what_is_left_to_torch_operations(here):
    x, spec = torch.ones(4, 6), cast_spec("e4m3")
    words = torch.zeros(4, 6, dtype=torch.int64)
    stochastic = cast_spec("e4m3", "stochastic")
    for t, how, random, out in (
        (x.t(), spec, None, torch.empty(6, 4)), (x, spec, None, torch.empty(6, 4).t()), (x, stochastic, words, x),
        (x.double(), spec, None, x), (x, spec, None, x.double()), (x, cast_spec("nf4"), None, x),
        (x, cast_spec("mxfp4"), None, x),
    ):  # fmt: skip
        assert not compiled.cast(t, how, random, out)
    here.setattr(compiled, "LEAST", 25)
    assert not compiled.cast(x, spec, None, x) and compiled.compiled.cache_info().misses == 0


def test_codes_that_a_compiled_cast_wrote_are_returned(monkeypatch):
    """A tensor without memory stands for one on a GPU."""
    monkeypatch.setattr(compiled, "cast", lambda x, spec, random, codes: codes.device.type == "meta")
    codes = torch_engine.encode(torch.empty(3, 4, device="meta"), cast_spec("e4m3"), None).codes
    assert (codes.shape, codes.dtype, codes.device.type) == ((3, 4), torch.uint8, "meta")


def test_a_compiler_that_fails_warns_once_and_torch_operations_serve(here):
    def broken(graph, **options):
        raise RuntimeError("no compiler here\nmore lines")

    here.setattr(torch, "compile", broken)
    x = torch.ones(4)
    message = r"^casts to e4m3 on cpu are one torch operation after another, .* says RuntimeError: no compiler here$"
    with pytest.warns(UserWarning, match=message):
        assert not compiled.cast(x, cast_spec("e4m3"), None, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compiled.cast(x, cast_spec("e4m3"), None, x)


def test_which_devices_are_served():
    compiled.compiles_casts.cache_clear()
    assert not compiled.compiles_casts("cpu") and not compiled.compiles_casts("mps")
    assert not torch.cuda.is_available() or compiled.compiles_casts("cuda")


def test_words_that_are_drawn_are_those_of_the_definition():
    lanes = compiled._lanes(cast_spec("e4m3", "stochastic"), 200, torch.device("cpu"))
    compiled._draw(torch.tensor(compiled.pieces_of(KEY)), *lanes)
    assert in_order(lanes, 200).tolist() == [random_word(KEY, i) for i in range(200)]


def fused(casts, x: torch.Tensor, compiler) -> list[torch.Tensor]:
    """Return what one compiled graph of several casts makes of a tensor."""
    steps = [compiled._steps(cast_spec(name, Rounding(mode=mode)), torch.float32) for name, mode in casts]

    made = compiled._lanes(cast_spec("e4m3", "stochastic"), x.numel(), x.device)

    def run(x, key, *rest):
        lanes, outs = rest[:4], rest[4:]
        for (_, mode), step, out in zip(casts, steps, outs, strict=True):
            step(x, out, *(lanes if mode == "stochastic" else ()))

    key = torch.tensor(compiled.pieces_of(KEY), device=x.device)
    outs = [torch.empty(x.numel(), dtype=torch.int32, device=x.device) for _ in casts]
    with torch.no_grad():
        if any(mode == "stochastic" for _, mode in casts):
            compiler(make_fx(compiled._draw, tracing_mode="symbolic")(key, *made))(key, *made)
        like = [*(lane.new_empty(176) for lane in made), *(out.new_empty(650) for out in outs)]
        graph = make_fx(run, tracing_mode="symbolic")(x.new_empty(650), key, *like)
        compiler(graph)(x.view(-1), key, *made, *outs)
    return [out.view(torch.float32).view(x.shape) for out in outs]


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch of itself
@pytest.mark.parametrize("casts", [
    [("e4m3", "nearest_even")], pytest.param([("e4m3", "stochastic")], marks=pytest.mark.slow),
    pytest.param(CASTS[:10], marks=pytest.mark.slow), pytest.param(CASTS[10:20], marks=pytest.mark.slow),
], ids=["e4m3", "stochastic", "first", "second"])  # fmt: skip
def test_inductor_has_the_bits_of_torch_operations(casts):
    x = wide_with_specials(7, 171, seed=2)
    found = fused(casts, x, lambda graph: torch.compile(graph, dynamic=True, fullgraph=True))
    for (name, mode), got in zip(casts, found, strict=True):
        expected = torch.empty_like(x)
        torch_engine.quantize(x, cast_spec(name, Rounding(mode=mode)), key_for(mode), expected)
        assert_same_bits(got, expected, x, what=f"{name} {mode}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "mode"), CASTS + MORE)
def test_a_gpu_has_the_bits_of_torch_operations(name, mode):
    x = wide_with_specials(1 << 9, 1 << 10, seed=3)
    spec, expected, found = (
        cast_spec(name, Rounding(mode=mode)),
        torch.empty_like(x),
        torch.empty_like(x, device="cuda"),
    )
    torch_engine.quantize(x, spec, key_for(mode), expected)
    assert compiled.cast(x.cuda(), spec, key_for(mode), found)
    assert_same_bits(found, expected, x)
