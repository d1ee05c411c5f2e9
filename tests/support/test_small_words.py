# SPDX-License-Identifier: Apache-2.0
"""What people write first: names of other libraries, arguments the other way round, results at a prompt."""

import copy
import inspect
from functools import partial

import pytest
import torch

import fmtsim
from fmtsim.formats.tensor_file import DTYPES
from fmtsim.lab.verify.vectors import check_part, read_vectors
from fmtsim.support.errors import ArgumentError, CoverageWarning, DtypeError
from tests.support.refusals import refused


def linear():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64))


def test_names_of_safetensors_and_onnx_are_formats():
    for text, name in (
        ("F8_E4M3", "e4m3"), ("F8_E5M2FNUZ", "e5m2fnuz"), ("F8_E8M0", "e8m0"), ("F6_E2M3", "e2m3"), ("F4", "e2m1"),
        ("F32", "fp32"), ("BF16", "bf16"), ("I8", "int8"), ("U4", "uint4"), ("FLOAT8E4M3FN", "e4m3"), ("FLOAT", "fp32"),
        ("FLOAT8E5M2", "e5m2"), ("FLOAT8E8M0", "e8m0"), ("FLOAT4E2M1", "e2m1"), ("float8_e4m3", "e4m3_ieee"),
    ):  # fmt: skip
        assert fmtsim.get_format(text).name == name
    for tag in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F16"):  # the other table of them
        dtype = DTYPES[tag]
        assert fmtsim.get_format(tag) == fmtsim.get_format(dtype)


@pytest.mark.parametrize("format", ["e4m3", torch.float8_e4m3fn, "F8_E4M3", "flex6_of_mine", fmtsim.get_format("int8")])
def test_a_format_in_place_of_a_recipe_is_the_format(format, scratch):
    fmtsim.register_format(
        fmtsim.FloatFormat(name="flex6_of_mine", exponent_bits=3, mantissa_bits=2, nan="none", infinities=False)
    )
    x, model = torch.randn(8, 64), linear()
    expected = fmtsim.convert(copy.deepcopy(model), format=format)(x)
    assert torch.equal(fmtsim.convert(model, format)(x), expected)


def test_a_recipe_of_the_name_comes_first_and_other_words_are_refused():
    assert fmtsim.report(fmtsim.convert(linear(), "te_current")).summary.startswith("te_current:")
    refused("recipe='e4m33' is unknown; did you mean", fmtsim.convert, linear(), "e4m33")
    refused("both name formats", fmtsim.convert, linear(), "te_current", format="e4m3")
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    text = str(fmtsim.report(fmtsim.convert(model, "nvfp4")))
    assert "te_nvfp4: " in text and "'nvfp4' is the recipe of that name, not the format (format='nvfp4')" in text
    assert "of that name" not in str(fmtsim.report(fmtsim.convert(linear(), format="nvfp4")))
    for target in ("h200", "hopper.wgmma", fmtsim.Datapath(block=4)):
        refused(r"recipe=.* is a target; write target= beside recipe= or format=", fmtsim.convert, linear(), target)


def test_keywords_of_other_libraries_name_what_says_the_same():
    for verb, keyword, hint in (
        (fmtsim.quantize, "saturate", "write overflow='saturate' or 'ieee'"),
        (fmtsim.encode, "seed", "write generator="), (fmtsim.cast, "rouding", "did you mean 'rounding'"),
    ):  # fmt: skip
        refused(rf"unexpected keyword argument '{keyword}'; {hint}", verb, torch.ones(2), "e4m3", error=TypeError,
                **{keyword: 0})  # fmt: skip
    for call, keyword, hint in (
        (partial(fmtsim.quantize, torch.ones(2)), "fmt", "write format="),
        (partial(fmtsim.encode, torch.ones(2)), "fmt", "write format="),
        (fmtsim.Datapath, "accumulator_bits", r"write accumulator=, or IntegerDatapath\(accumulator_bits=\)"),
        (fmtsim.IntegerDatapath, "overflow", "write saturate=True or False"),
        (fmtsim.Quantizer, "block", r"write scaling=Scaling\(block=\)"),
        (partial(fmtsim.Quantizer, "e4m3"), "scale", r"write scaling=Scaling\(scale=\)"),
        (fmtsim.Scaling, "block_size", "write block="), (partial(fmtsim.linear_config, "e4m3"), "grad", "write g="),
        (partial(fmtsim.observe, torch.ones(2)), "fmt", "write format="),
        (partial(fmtsim.compare, torch.ones(2), torch.ones(2)), "likes", "did you mean 'like'\\?"),
        (partial(fmtsim.explain, 1.0, "e4m3"), "roundin", "did you mean 'rounding'\\?"),
        (partial(fmtsim.vectors, "e4m3"), "seed", "write generator="),
        (partial(fmtsim.ptq, linear(), "int4_g32"), "unit", "write target="),
        (partial(fmtsim.bisect, linear(), linear()), "batches", "did you mean 'batch'\\?"),
        (partial(fmtsim.export, linear(), "folder"), "layouts", "did you mean 'layout'\\?"),
    ):  # fmt: skip
        refused(rf"unexpected keyword argument '{keyword}'; {hint} \(it takes", call, error=TypeError, **{keyword: 32})


def test_arguments_by_position_are_told_their_keyword():
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    for verb, first, word in (
        (fmtsim.mm, "a, b", "h200"), (fmtsim.bmm, "a, b", "h200"), (fmtsim.linear, "x, w, bias", "h200"),
        (fmtsim.int_mm, "a, b", "int8"), (fmtsim.mma, "a, b, c", "exact"), (fmtsim.explain_mm, "a, b", "h200"),
        (fmtsim.convert, "model, recipe", "h200"), (fmtsim.ptq, "model, recipe, calibration_data", "h200"),
    ):  # fmt: skip
        refused(rf"{verb.__name__}\(\) takes {first} by position; write target='{word}'$", verb,
                *[x] * len(first.split()), word, error=TypeError)  # fmt: skip
    refused("write out_dtype= target= plan= ", fmtsim.mm, x, x, torch.float32, error=TypeError)
    refused(r"takes run_a, run_b, batch, loss by position; leave 3 out$", fmtsim.bisect, x, x, x, x, 3, error=TypeError)
    refused("takes x, format by position; write rounding= ", fmtsim.explain, 1.0, "e4m3", "up", error=TypeError)
    refused("takes x, format, rounding by position; write overflow= ", fmtsim.encode, x, "e4m3", "up", "ieee",
            error=TypeError)  # fmt: skip
    refused(
        "layout=None is unknown; choose one of compressed-tensors, torchao, gguf", fmtsim.export, linear(), "folder"
    )
    refused("layout=None is unknown", fmtsim.export, linear(), "gguf")


def test_help_names_types_and_keywords():
    for verb in (fmtsim.linear, fmtsim.bmm, fmtsim.scaled_mm, fmtsim.convert, fmtsim.quantize, fmtsim.linear_config):
        text = str(inspect.signature(verb))
        assert "**" not in text and "<class" not in text and "FloatFormat" not in text
    assert "accumulate" in inspect.signature(fmtsim.linear).parameters


def test_encoded_speaks_torch():
    encoded = fmtsim.encode(torch.randn(4, 64), "mxfp4")
    assert torch.equal(encoded.dequantize(), encoded.decode()) and encoded.to("cpu").device.type == "cpu"
    for other in ("nvfp4", torch.bfloat16):
        refused("to takes a device, .* another format is fmtsim.encode", encoded.to, other, error=ArgumentError)


def test_arguments_of_export_are_understood_the_other_way_round(tmp_path):
    model = fmtsim.ptq(linear(), "mxfp4_weights")
    assert fmtsim.export(model, "compressed-tensors", tmp_path / "a").files[0].parent == tmp_path / "a"
    refused("layout='b' is unknown; choose one of", fmtsim.export, model, tmp_path / "a", "b")


def test_tensors_of_two_dtypes_are_compared_as_the_wider_values():
    x = torch.randn(64)
    found = fmtsim.compare(x.bfloat16(), x, cast=True)
    assert found.dtype == "float32" and found.sqnr_db == fmtsim.compare(x.bfloat16().float(), x).sqnr_db
    assert fmtsim.compare(x.numpy(), x.double(), cast=True).equal
    assert fmtsim.compare(torch.arange(5), torch.arange(5.0).numpy(), cast=True).dtype == "float64"
    refused("pass cast=True for the wider values", fmtsim.compare, x.bfloat16(), x, error=DtypeError)


def test_results_at_a_prompt_are_short():
    x = torch.randn(64)
    assert repr(fmtsim.explain(0.3, "e4m3")).endswith("check   the engine gives the same bits")
    assert repr(fmtsim.explain(x, "mxfp4")) == "Explanation(64 numbers in mxfp4; print shows all)"
    assert fmtsim.explain(0.3, "e4m3")._repr_html_().startswith("<pre>e4m3, rounding nearest_even")
    assert len(repr(fmtsim.compare(x, x + 1)).split("\n")) == 7
    with fmtsim.simulate() as run:
        torch.relu(x)
    assert str(run) == run.summary and "exact: relu 1" in repr(run)


def test_vectors_are_written_and_compared_but_for_the_sign_of_nan(tmp_path):
    vectors = fmtsim.vectors("e4m3", tmp_path / "v", overflow="ieee")
    assert torch.equal(fmtsim.encode(vectors.tensors["input"], "e4m3", overflow="ieee").codes, vectors.tensors["codes"])
    codes = vectors.tensors["codes"].clone()
    (nan,) = (codes & 0x7F == 0x7F).nonzero(as_tuple=True)
    codes[nan] ^= 0x80
    found = check_part(read_vectors(tmp_path / "v"), "codes", codes)
    assert (found["mismatches"], found["other_nan"], found["first"]) == (0, len(nan), [])
    first, last = vectors.groups["ties"]
    codes[first : last + 1] ^= 1
    found = check_part(vectors, "codes", codes, every=True)
    assert found["groups"]["ties"] == found["mismatches"] == len(found["first"]) == last - first + 1
    assert len(check_part(vectors, "codes", codes)["first"]) == 1


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_compiled_code_is_refused_with_what_tells_what_compiling_changes():
    model, x = linear(), torch.randn(8, 64)
    compiled = torch.compile(model, backend="eager")
    found = fmtsim.bisect(model, compiled, x)
    assert found.equal and found.rows == ()  # and what Inductor would change is not said of another backend
    refused("is compiled, .*fmtsim.bisect.*emulate_precision_casts", fmtsim.trace, compiled, x)
    match = "runs inside torch.compile, .*emulate_precision_casts"
    with pytest.raises(ArgumentError, match=match), fmtsim.trace(model):
        compiled(x)


def test_models_that_another_library_compressed_say_so():
    model = torch.nn.Sequential(linear(), torch.nn.Linear(64, 64))
    layer = model[0][0]
    del layer.weight  # as compressed-tensors leaves it until the first call, which wraps forward's function
    layer.weight_packed = torch.nn.Parameter(torch.zeros(64, 8, dtype=torch.int32), requires_grad=False)
    layer.quantization_scheme = object()
    with pytest.warns(CoverageWarning, match=r"load it with CompressedTensorsConfig\(dequantize=True\)"):
        fmtsim.ptq(model, "int8_token", ignore=[])
    wrapped = fmtsim.nn.conversion.Wrapped(lambda *args: args, 1)
    assert wrapped.__func__(model, 2) == wrapped(2) == (1, 2)
