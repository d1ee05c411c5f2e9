# SPDX-License-Identifier: Apache-2.0
"""Exports hold the bits that ptq and training rounded to, as fmtsim reads them and as the libraries themselves do."""

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.formats.scaling import Scaling, TensorScale
from fmtsim.formats.tensor_file import StoredTensor, read_tensors, write_tensors
from fmtsim.nn.conversion import root
from fmtsim.ptq.export import gguf as gguf_layout
from fmtsim.ptq.export.compressed_tensors import _reciprocals as reciprocals
from fmtsim.ptq.export.compressed_tensors import config_of
from fmtsim.ptq.reshape import transform_input
from fmtsim.ptq.weight_grid import nearest
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.scaling.levels import tensor_factor
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, CoverageWarning, DataError, FmtsimError
from tests.support.bits import assert_same_bits
from tests.support.operands import normal
from tests.support.refusals import refused

FLOAT8 = ("e4m3_static", "e4m3_token", "nemotron", "e4m3_token_24")
SCHEMES = {
    "compressed-tensors": (
        *FLOAT8, "int4_g32", "int4_channel", "int4_gptq", "int4_token", "w4a4", "int8_token", "int8_static",
        "mxfp4_dynamic", "mxfp6_dynamic", "mxfp8_dynamic", "mxfp4_weights", "nvfp4_static", "nvfp4_weights",
    ),
    "torchao": ("int4_g32", "int4_channel", "int4_gptq", "int8_token", "e4m3_token", "e4m3_dynamic", "mxfp4_weights",
                "nvfp4_weights"),
    "gguf": ("q8_0", "q4_0", "mxfp4_weights"),
}  # fmt: skip
CASES = [(layout, scheme) for layout, schemes in SCHEMES.items() for scheme in schemes]
ENDS = {"compressed-tensors": "", "torchao": ".safetensors", "gguf": ".gguf"}
ANOTHER_ORDER = PtqRecipe(
    name="torchao_order",
    w=Quantizer(
        format="e2m1",
        scaling=Scaling(block=(1, 16), scale=fmtsim.get_format("e4m3"), tensor=TensorScale(order="torchao")),
    ),
)
READERS = Path(__file__).with_name("other_readers.py")


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)).to(dtype)


def quantised(scheme, dtype=torch.float32, model=None, **machine):
    return fmtsim.ptq(net(dtype) if model is None else model, scheme, [normal(32, 64, seed=1).to(dtype)], **machine)


def padded(scheme, *sizes):
    """Quantise layers whose last blocks are short, which ptq says before it runs."""
    model = nn.Sequential(*(nn.Linear(n, m) for n, m in zip(sizes, sizes[1:], strict=False)))
    with pytest.warns(CoverageWarning, match=r"blocks do not divide 1 \(\d+ inputs, blocks of \d+\).*: the last one"):
        return quantised(scheme, model=model)


def rotated_online():
    model = quantised("int4_channel", model=nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    model[2].register_forward_pre_hook(transform_input)  # as attach gives it to a decoder's down_proj
    return model


def tensors_of(model):
    return {name: t for name, t in model.state_dict().items() if "fmtsim_state" not in name}


def same(found, model):
    own = tensors_of(model)
    return set(found) == set(own) and all(torch.equal(found[name].to(t.dtype), t) for name, t in own.items())


@pytest.mark.parametrize(("layout", "scheme"), CASES)
def test_an_export_holds_what_was_rounded(layout, scheme, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        model, path = quantised(scheme, dtype), tmp_path / f"{dtype}{ENDS[layout]}"
        found = fmtsim.export(model, path, layout)
        assert list(found.coded) == ["0", "2"] and found.values == ("0.bias",)
        assert same(fmtsim.read_export(path), model)
        first, second = str(found).splitlines()
        assert first.endswith(f"{layout}, weights of 2 in {found.coded['0']}, 1 tensors as values")
        assert second == "read back: all 3 tensors have the bits that were meant" and found.checked == 3


def test_a_config_without_architectures_gets_the_models_class(tmp_path):
    model = quantised("int4_g32")
    for architectures, written in ((None, ["Sequential"]), (["Other"], ["Other"])):
        model.config = SimpleNamespace(to_dict=lambda found=architectures: {"architectures": found})
        fmtsim.export(model, tmp_path / "m", "compressed-tensors")
        assert json.loads((tmp_path / "m" / "config.json").read_text())["architectures"] == written


def test_a_config_groups_layers_by_scheme_and_names_the_layout(tmp_path):
    fmtsim.export(quantised("int4_g32"), tmp_path / "m", "compressed-tensors")
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    (group,) = said["config_groups"].values()
    assert (said["format"], said["ignore"], group["targets"]) == ("pack-quantized", [], ["0", "2"])
    schemes = {"a": {"format": "x"}, "b": {"format": "y"}, "c": {"format": "x"}}
    said = json.loads(config_of(nn.Module(), schemes, ["d"]))["quantization_config"]
    assert [group["targets"] for group in said["config_groups"].values()] == [["a", "c"], ["b"]]
    assert (said["format"], said["ignore"]) == ("mixed-precision", ["d"])


def test_a_machines_model_a_loaded_one_and_one_in_training_are_exported(tmp_path):
    model = quantised("int4_gptq", target="chain")
    loaded = fmtsim.load_state(net(), fmtsim.state(model))
    trained = fmtsim.convert(net(), recipe="ao_int4_qat")
    for name, each in (("ptq", model), ("loaded", loaded), ("trained", trained)):
        fmtsim.export(each, tmp_path / name, "torchao")
    assert same(fmtsim.read_export(tmp_path / "ptq"), model)
    assert (tmp_path / "ptq").read_bytes() == (tmp_path / "loaded").read_bytes()
    rounded = fmtsim.read_export(tmp_path / "trained")
    for n in "02":
        layer = trained.get_submodule(n)
        assert torch.equal(rounded[f"{n}.weight"], nearest(layer.weight, layer.emulation.config.fprop.b))


@pytest.fixture(scope="module")
def reads():
    """A Python that has the libraries: FMTSIM_READERS_PYTHON, or this one."""
    python = os.environ.get("FMTSIM_READERS_PYTHON", sys.executable)
    imports = "import torchao, compressed_tensors, gguf, safetensors"
    if subprocess.run([python, "-W", "ignore", "-c", imports], capture_output=True).returncode:
        pytest.skip(
            f"{python} lacks torchao, compressed-tensors or gguf; FMTSIM_READERS_PYTHON names one that has them"
        )
    return lambda *paths: subprocess.run([python, READERS, *map(str, paths)], check=True, capture_output=True)


def test_the_libraries_read_the_same_bits(reads, tmp_path):
    models = {}
    for layout, scheme in CASES:
        dtype = torch.bfloat16 if scheme.startswith("nvfp4") else torch.float32  # two scales: rounded in another order
        path = tmp_path / f"{layout}_{scheme}{ENDS[layout]}"
        models[path] = quantised(scheme, dtype)
        fmtsim.export(models[path], path, layout)
    reads(*models)
    wrong = [path.name for path, model in models.items() if not same(torch.load(f"{path}.values"), model)]
    assert not wrong


def test_torchao_computes_what_a_model_trained_for_int4_does(reads, tmp_path):
    model, x = fmtsim.convert(net(), recipe="ao_int4_qat"), normal(16, 64, seed=2)
    fmtsim.export(model, tmp_path / "qat.safetensors", "torchao")
    torch.save((x, (64, 96, 64)), tmp_path / "qat.inputs")
    reads(tmp_path / "qat.safetensors")
    assert torch.equal(torch.load(tmp_path / "qat.outputs"), model(x))


def test_sizes_are_those_of_the_codes(tmp_path):
    model = quantised("q4_0", model=nn.Sequential(nn.Linear(64, 4096, bias=False)))
    fmtsim.export(model, tmp_path / "m.gguf", "gguf", names={"0.weight": "output.weight"})
    assert (tmp_path / "m.gguf").stat().st_size < 64 * 4096 * 4.6 / 8 + 1024
    assert torch.equal(fmtsim.read_export(tmp_path / "m.gguf")["output.weight"], model[0].weight)


def changed(scheme):
    model = quantised(scheme)
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-3
    return model


BAD = [
    (net, "torchao", r"export found no converted module in Sequential; convert it first"),
    (lambda: fmtsim.convert(net(), recipe="fp32"), "torchao", r"Sequential has no linear layer with a quantised"),
    (lambda: quantised("int4_g32"), "onnx", r"layout='onnx' is unknown; choose one of compressed-tensors, "),
    (lambda: "model.gguf", "gguf", "export takes a torch.nn.Module, not str; pass the model itself"),
    (lambda: changed("int4_g32"), "torchao", r"layer '0': its weight is not what fmtsim.ptq rounded"),
    (lambda: quantised("int4_gptq_dynamic"), "torchao", r"its weight is not what .* Gptq\(groups='static'\)"),
    (lambda: quantised("nvfp4_dynamic"), "compressed-tensors",
     r"layer '0': the scale of the inputs' tensor is made in every call, .*; quantise with nvfp4_static"),
    (lambda: quantised(ANOTHER_ORDER), "compressed-tensors",
     r"layer '0': tensor scale 4.64955629e-05 becomes 4.64955665e-05, the nearest reciprocal; quantise with "
     r"nvfp4_static or nvfp4_weights, whose scales are reciprocals, or pass allow_rescale=True"),
    (lambda: quantised("nvfp4_static"), "torchao",
     r"inputs are e2m1, .*calibrated|inputs are e2m1.*; choose nvfp4_weights, or nvfp4_static with layout='compressed"),
    (lambda: quantised("minifloat_e3m2"), "compressed-tensors", r"has no e3m2_finite in blocks of \(1, 64\)"),
    (lambda: quantised("int4_token"), "torchao", r"torchao has no integer weights under inputs in int8"),
    (lambda: quantised("e4m3_static"), "torchao", r"torchao has no float8 weights under inputs in e4m3"),
    (lambda: quantised("mxfp8_dynamic"), "torchao", r"MX weights alone, and inputs are mxfp8_e4m3"),
    (lambda: quantised("nvfp4_dynamic"), "torchao", r"NVFP4 weights alone, and inputs are nvfp4"),
    (lambda: quantised("minifloat_e3m2"), "torchao", r"torchao has no e3m2_finite in blocks of \(1, 64\)"),
    (lambda: quantised("int4_g32"), "gguf", r"GGUF's scales are float16, which does not hold these"),
    (lambda: quantised("int4_channel"), "gguf", r"GGUF's blocks are 1 x 32, and these \(1, 64\) of 96 x 64"),
    (lambda: quantised("int8_token"), "gguf", r"GGUF stores weights alone, and inputs are int8"),
    (lambda: quantised(PtqRecipe(name="w", w=Quantizer(format="hif4"))), "gguf",
     r"layer '0': the package gguf has no type hif4; choose q8_0, q4_k or"),
    (lambda: quantised("q2_0"), "gguf", r"layer '0': the package gguf has no type Q2_0; choose q8_0, q4_k or"),
    (lambda: quantised(PtqRecipe(name="w", w=Quantizer(format="hif4"))), "torchao",
     r"layer '0': torchao has no hif4; "),
    (lambda: quantised("hif4"), "gguf", r"layer '0': GGUF stores weights alone, and inputs are"),
    (lambda: quantised("mxfp4_weights", model=nn.Linear(64, 64)), "gguf", r"wrap it in nn.Sequential"),
    (lambda: fmtsim.convert(net(), recipe="halo1"), "torchao", r"its weight is Hadamard .*, not one set of codes"),
    (lambda: fmtsim.convert(net(), format="uint8_channel_zp"), "torchao", r"scales are not kept apart"),
    (lambda: padded("nvfp4_static", 64, 24, 8), "compressed-tensors",
     r"layer '1': blocks of \(1, 16\) do not divide 8 x 24; leave the layer out"),
    (lambda: padded("mxfp4_weights", 64, 48, 8), "compressed-tensors",
     r"layer '1': blocks of \(1, 32\) do not divide 8 x 48; leave the layer out"),
    (lambda: padded("int4_g32", 64, 48, 8), "torchao",
     r"layer '1': blocks of \(1, 32\) do not divide 8 x 48; leave the layer out"),
    (lambda: padded("int4_g32", 64, 48, 8), "compressed-tensors",
     r"layer '1': blocks of \(1, 32\) do not divide 8 x 48; leave the layer out with ignore=$"),
    (lambda: padded("int4_g32", 64, 48, 40, 8), "compressed-tensors",
     r"layer '1': blocks of \(1, 32\) do not divide 40 x 48; leave .*; likewise 2$"),
    (lambda: quantised("gaudi_unit"), "compressed-tensors", r"has no e4m3_ieee in blocks of"),
    (lambda: quantised("e3m4_static"), "compressed-tensors", r"has no e3m4fn in blocks of"),
    (lambda: quantised("e5m2_direct"), "compressed-tensors", r"has no e5m2 in blocks of"),
    (lambda: fmtsim.ptq(nn.Sequential(nn.Conv1d(64, 64, 1)), "int4_g32"), "torchao",
     r"the quantised layers of Sequential are Conv1d, and layouts have codes of nn.Linear alone; save it by"),
    (lambda: rotated_online(), "compressed-tensors",
     r"layer '2': its inputs are rotated at every call, for which .*; choose a recipe without Rotate\(online=True\)"),
    (lambda: quantised("int8_smooth", model=nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 8))), "torchao",
     r"layer '1': its inputs are divided by channel at every call, .*; choose a recipe without smooth="),
]  # fmt: skip


@pytest.mark.parametrize(("make", "layout", "message"), BAD)
def test_what_a_layout_cannot_hold_is_refused(make, layout, message, tmp_path):
    refused(message, fmtsim.export, make(), tmp_path / "out", layout)
    assert not list(tmp_path.iterdir())


def nvfp4_config(model, path, **options):
    exported = fmtsim.export(model, path, "compressed-tensors", **options)
    stored, _ = read_tensors(path / "model.safetensors")
    return exported, {name: torch.frombuffer(data, dtype=torch.float32) for name, (_, _, data) in stored.items()
                      if name.endswith("global_scale")}  # fmt: skip


def test_nvfp4_stores_reciprocals_that_decode_to_its_tensor_scales(tmp_path):
    model = quantised("nvfp4_static")
    exported, scales = nvfp4_config(model, tmp_path / "m")
    group = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] == "local" and group["weights"]["strategy"] == "tensor_group"
    assert exported.rescaled == {} and len(scales) == 4
    for name in "02":
        memory = dict(model.get_submodule(name)._modules["fmtsim_state"].named_children())
        assert torch.equal(scales[f"{name}.input_global_scale"], memory["x_f"].factor.reshape(1))
        ours = root(model).quantised.weights[name].tensor_scale
        assert torch.equal(1 / scales[f"{name}.weight_global_scale"], ours.reshape(1))


def test_every_tensor_scale_of_nvfp4_has_a_reciprocal():
    amaxes = torch.cat([normal(4000, seed=3).abs() * 2.0**k for k in (-60, -20, 0, 20, 60)])
    factors = tensor_factor(amaxes, fmtsim.get_format("nvfp4").scaling, 6.0)
    assert all(reciprocals(1 / f)[0].reciprocal() == 1 / f for f in factors.unbind())
    without = torch.tensor(4.64955629e-05)  # 1 / (1 / x) is another number
    assert [1 / g != without for g in reciprocals(without)] == [True]


def test_rescaling_is_allowed_by_name_and_reported(tmp_path):
    model = quantised(ANOTHER_ORDER)
    exported, scales = nvfp4_config(model, tmp_path / "m", allow_rescale=True)
    ours = {name: weight.tensor_scale for name, weight in root(model).quantised.weights.items()}
    moved = [name for name in "02" if not torch.equal(1 / scales[f"{name}.weight_global_scale"], ours[name].reshape(1))]
    assert moved and set(moved) <= set(exported.rescaled)
    assert f"layer '{moved[0]}': tensor scale {ours[moved[0]].item():.9g} becomes " in str(exported)
    refused(r"allow_rescale=True with layout='torchao', which", fmtsim.export, model, "never", "torchao",
            allow_rescale=True)  # fmt: skip


def test_names_are_for_gguf(tmp_path):
    with pytest.raises(ArgumentError, match=r"names= with layout='torchao', whose names are the model's"):
        fmtsim.export(quantised("q8_0"), tmp_path / "m", "torchao", names={})
    with pytest.raises(ArgumentError, match=r"names= has '1.weight', which the model has not"):
        fmtsim.export(quantised("q8_0"), tmp_path / "m", "gguf", names={"1.weight": "x"})


def test_files_of_another_kind_are_refused(tmp_path, monkeypatch):
    write_tensors(tmp_path / "m.safetensors", {"a": StoredTensor("U8", (1,), b"0")}, {})
    with pytest.raises(
        DataError, match=r"m.safetensors has no tensors of torchao .'tensor_names'.; pass what fmtsim.export wrote"
    ):
        fmtsim.read_export(tmp_path / "m.safetensors")
    (tmp_path / "m.gguf").write_bytes(b"not a file of ggml")
    refused(r"m.gguf is not a GGUF file that can be read", fmtsim.read_export, tmp_path / "m.gguf", error=DataError)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(FmtsimError, match=r"layout='gguf' needs the package gguf; pip install 'fmtsim\[gguf\]'"):
        fmtsim.export(quantised("q8_0"), tmp_path / "n.gguf", "gguf")


def test_every_scale_and_code_of_ggmls_mxfp4_is_what_gguf_py_reads(tmp_path):
    gguf = gguf_layout.library()
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8)
    blocks = torch.cat([torch.arange(256, dtype=torch.uint8)[:, None], codes.expand(256, 16)], 1)  # 255: 2^128
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "none")
    writer.add_tensor("w", blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.MXFP4)
    w = fmtsim.read_export(tmp_path / "m.gguf")["w"].reshape(256, 32)
    assert_same_bits(w + 0.0, torch.from_numpy(expected.copy()) + 0.0)  # gguf-py has no -0
    assert w[255].isinf().any() and w[255].abs().min() == 0 and (w[255].abs() == 2.0**127).any()


def blocks_model():
    return nn.Sequential(nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 256)).requires_grad_(False)


@pytest.mark.parametrize(
    "name", [n for n in fmtsim.list_formats("ggml") if fmtsim.get_format(n).encoder and n != "q2_0"]
)
def test_ggmls_blocks_go_into_files_as_they_were_rounded(name, tmp_path):
    gguf, fmt, path = gguf_layout.library(), fmtsim.get_format(name), tmp_path / "m.gguf"
    model = blocks_model()
    w = model[0].weight.clone()
    fmtsim.ptq(model, name, filter_fn=lambda module, layer: layer == "0")
    assert torch.equal(model[0].weight, fmtsim.quantize(w, name))
    assert fmtsim.export(model, path, "gguf").coded == {"0": name}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["0.weight"]
    assert stored.tensor_type.name == fmt.type and stored.shape.tolist() == [256, 8]
    assert torch.equal(torch.from_numpy(stored.data.copy()), fmtsim.encode(w, name).codes)
    if name != "q1_0":  # which gguf-py does not decode
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        assert_same_bits(torch.from_numpy(values.copy()), model[0].weight)
    checkpoint = fmtsim.open_checkpoint(path)
    assert checkpoint["0.weight"].format == fmt and checkpoint.layout("0.weight") == f"GGUF {fmt.type}"
    assert_same_bits(fmtsim.read_export(path)["0.weight"], model[0].weight)
    # the state keeps the bytes, which values rounded again need not give
    fmtsim.export(fmtsim.load_state(blocks_model(), fmtsim.state(model)), tmp_path / "n.gguf", "gguf")
    assert (tmp_path / "n.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_types_with_codebooks_are_read(kind, tmp_path):
    gguf = gguf_layout.library()
    kind = gguf.GGMLQuantizationType[kind]
    blocks = torch.randint(0, 256, (3, gguf.GGML_QUANT_SIZES[kind][1]), dtype=torch.uint8).numpy()
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "none")
    writer.add_tensor("w", blocks, raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
    expected = torch.where(expected.isnan(), torch.nan, expected)
    assert_same_bits(fmtsim.read_export(tmp_path / "k.gguf")["w"], expected)


def header(*pairs, count=1, rank=2, sizes=(32, 3), kind=8, start=0):
    """Return a GGUF file of one tensor, w, with 64 zeros behind its header."""
    text = lambda b: struct.pack("<Q", len(b)) + b  # noqa: E731
    head = struct.pack("<4sIQQ", b"GGUF", 3, count, len(pairs)) + b"".join(text(key) + value for key, value in pairs)
    return head + text(b"w") + struct.pack(f"<I{len(sizes)}QIQ", rank, *sizes, kind, start) + bytes(64)


def test_headers_of_gguf_files_are_read_and_held_to_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    read = lambda: fmtsim.read_export(path)["w"]  # noqa: E731
    words = struct.pack("<IIQ", 9, 8, 2) + 2 * (struct.pack("<Q", 3) + b"abc")
    nested = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 4, 5) + bytes(20)
    numbers = struct.pack("<IIQ", 9, 12, 3) + bytes(24)
    pairs = ((b"tokens", words), (b"n", nested), (b"x", numbers), (b"general.alignment", struct.pack("<II", 4, 8)))
    content = header(*pairs, sizes=(32, 1))
    at = -(-(len(content) - 64) // 8) * 8
    block = fmtsim.encode(normal(1, 32, seed=3), "q8_0")
    path.write_bytes(content[:at].ljust(at, b"\0") + block.codes.numpy().tobytes() + bytes(6))
    assert torch.equal(read(), block.decode())
    for content, message in (
        (header(), r"m.gguf: 'w' ends at byte 198, the file at 129; it is truncated"),
        (header(sizes=(48, 1)), r"'w' has rows of 48 elements, which blocks of 32 \(Q8_0\) do not fill"),
        (
            b"GGUF" + struct.pack(">I", 3) + bytes(40),
            r"it begins with b'GGUF\\x00\\x00\\x00\\x03', not with GGUF and version",
        ),
        (header(count=1 << 40), r"m.gguf is not a GGUF file that can be read: unpack_from requires"),
        (header((b"a", struct.pack("<I", 99))), r"m.gguf is not a GGUF file that can be read: 99"),
        (b"", r"m.gguf is not a GGUF file that can be read"),
    ):
        path.write_bytes(content)
        refused(message, read, error=DataError)


def test_a_type_of_ggml_that_is_not_known_is_named(tmp_path):
    gguf = gguf_layout.library()
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "none")
    writer.add_tensor("w", torch.zeros(1, 40, dtype=torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.Q8_1)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with pytest.raises(DataError, match=r"k.gguf: 'w' is of type 9; known are 0 \(torch.float32\), .*, 12 \(Q4_K\)"):
        fmtsim.read_export(tmp_path / "k.gguf")


def test_a_state_says_what_weights_were_rounded_with_and_older_ones_do_not():
    state = fmtsim.state(quantised("int4_g32"))
    for weights, message in (
        (3, r"the state has 'weights': 3; it should be a dict"),
        ({"0": {"w": {}}}, r"the state's weights.0 has no 'x'"),
        ({"0": {"w": {"format": "e9"}, "x": {}, "scales": {}}}, r"the state's weights.0.w.format: unknown format 'e9'"),
    ):
        refused(message, fmtsim.load_state, net(), {**state, "weights": weights}, error=FmtsimError)
    older = fmtsim.load_state(net(), {name: value for name, value in state.items() if name != "weights"})
    refused(r"no linear layer with a quantised weight; call fmtsim.ptq", fmtsim.export, older, "never", "torchao")


def exported(tmp_path, scheme="int4_g32", layout="compressed-tensors"):
    path = tmp_path / f"m{ENDS[layout]}"
    fmtsim.export(quantised(scheme), path, layout)
    return path


WRONG = (None, "x", -1, 0, 3, 1.5, True, False, [], ["x"], {}, {"x": 1}, [1, 2], "block", "channel", 10**30)


@pytest.mark.parametrize("scheme", ["int4_g32", "int8_token", "e4m3_static", "mxfp4_dynamic", "nvfp4_weights"])
def test_a_wrong_field_of_config_json_is_named_with_the_file(tmp_path, scheme):
    """Each field in turn is left out or holds something else: an error names file and field, or values are right."""
    path = exported(tmp_path, scheme) / "config.json"
    good, expected, refusals = path.read_text(), fmtsim.read_export(path.parent), Counter()

    def places(tree):
        for key, value in tree.items():
            yield tree, key
            yield from places(value) if isinstance(value, dict) else ()

    for number in range(len(list(places(json.loads(good))))):
        for value in (..., *WRONG):
            config = json.loads(good)
            holder, key = list(places(config))[number]
            holder[key] = value
            if value is ...:
                del holder[key]
            path.write_text(json.dumps(config))
            try:
                values = fmtsim.read_export(path.parent)
            except DataError as error:
                assert str(path) in str(error), f"{key}={value!r}: {error}"
                refusals[key] += 1
            else:
                assert set(values) == set(expected) and all(torch.equal(values[n], x) for n, x in expected.items()), key
    assert refusals.keys() >= {"quantization_config", "config_groups", "group_0", "targets", "weights", "num_bits",
                               "type", "symmetric", "strategy", "dynamic", "format", "quant_method"}  # fmt: skip
    assert not refusals.keys() & {"ignore", "kv_cache_scheme", "quantization_status", "input_activations"}


@pytest.mark.parametrize(
    ("scheme", "old", "new", "message"),
    [
        ("int4_g32", '"num_bits": 4', '"num_bits": 5', r"'0.weight_shape' is \[96, 64\], of which \(96, 8\) words"),
        ("int4_g32", '"group_size": 32', '"group_size": 64', r"'0.weight_scale' of shape \(96, 2\) is not"),
        ("int4_g32", '"group_size": 32', '"size": 32', r"group_0.weights has no 'group_size'; pass what was saved"),
        ("int4_g32", '"0",', '"1",', r"config_groups: no targets name the layer of tensor '0.weight_packed'"),
        ("int4_g32", '"0",', "", r"no targets name the layer of tensor '0.weight_packed'"),
        ("int4_g32", '"pack-q', '"int-q', r"'num_bits': 4; it should be 8"),
        ("int8_token", '"int-q', '"pack-q', r"group_0: tensor '0.weight_packed' is missing; its layer has .weight, "),
        ("int8_token", '"channel"', '"tensor"', r"'0.weight_scale' of shape \(96, 1\) is not a scale"),
        ("mxfp4_dynamic", '"mxfp4-pack', '"nvfp4-pack', r"'0.weight_scale' is torch.uint8 of .*; expected torch.fl"),
        ("e4m3_static", '"symmetric": true', '"symmetric": 1', r"has 'symmetric': 1; it should be True"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_the_tensors_is_refused(tmp_path, scheme, old, new, message):
    path = exported(tmp_path, scheme) / "config.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    refused(rf"{path}: .*{message}", fmtsim.read_export, path.parent, error=DataError)


def test_float8_rows_of_32_inputs_are_no_microscaled_blocks(tmp_path):
    model = quantised("e4m3_static", model=nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)))
    fmtsim.export(model, tmp_path / "m", "compressed-tensors")
    assert same(fmtsim.read_export(tmp_path / "m"), model)


def test_a_models_own_config_may_hold_infinities(tmp_path):
    path = exported(tmp_path)
    expected = fmtsim.read_export(path)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace("{", '{"limit": Infinity,', 1))
    values = fmtsim.read_export(path)
    assert set(values) == set(expected) and all(torch.equal(values[name], x) for name, x in expected.items())


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("int4_g32", {"block_size": [1, 64]}, r"'0._weight_scale' of shape \(96, 2\) is not a scale"),
        ("int4_g32", {"block_size": [32]}, r"is not a scale for each block of 32 of a weight of 96 x 64"),
        ("mxfp4_weights", {"is_swizzled_scales": True}, r"_data has 'is_swizzled_scales': True; it should be False"),
        ("mxfp4_weights", {"elem_dtype": "fp4"}, r"_data has 'elem_dtype': 'fp4'; expected \{'_type': 'torch.dtype'"),
        ("mxfp4_weights", {"_type": "NVFP4Tensor"}, r"'0._weight_scale' is torch.float8_e8m0fnu .*; expected to"),
        ("mxfp4_weights", {"_type": "Other"}, r"has '_type': 'Other'; it should be 'Int8Tensor' or"),
        ("nvfp4_weights", {"zero": "per_tensor_scale"}, r"'0._weight_per_tensor_scale' is missing"),
        ("int4_g32", {"ones": "zero_point"}, r"'0._weight_zero_point' has numbers other than 0"),
    ],
)  # fmt: skip
def test_a_record_of_torchao_that_does_not_fit_the_tensors_is_refused(tmp_path, scheme, change, message):
    path = exported(tmp_path, scheme, "torchao")
    tensors, metadata = read_tensors(path)
    record = json.loads(metadata["0.weight"])
    if "zero" in change:
        del tensors[f"0._weight_{change['zero']}"]
    elif "ones" in change:
        name = f"0._weight_{change['ones']}"
        tensors[name] = tensors[name]._replace(data=bytes([1]) * len(tensors[name].data))
    elif "_type" in change:
        record |= change
    else:
        record["_data"] |= change
    write_tensors(path, tensors, metadata | {"0.weight": json.dumps(record)})
    refused(rf"{path}: '0.weight': .*{message}", fmtsim.read_export, path, error=DataError)


def test_what_is_no_path_or_no_dtype_of_exports_is_refused(tmp_path):
    for value in (None, 3, b"m", torch.zeros(2)):
        refused(r"is not a path; pass what fmtsim.export wrote, a folder or a file", fmtsim.read_export, value,
                error=DataError)  # fmt: skip
    six = {"a": StoredTensor("F6_E2M3", (4,), b"000")}
    write_tensors(tmp_path / "m", six, {"tensor_names": '["a"]', "a": '{"_type": "Tensor"}'})
    refused(r"m: tensor 'a' is F6_E2M3; expected one of F64, ", fmtsim.read_export, tmp_path / "m", error=DataError)
