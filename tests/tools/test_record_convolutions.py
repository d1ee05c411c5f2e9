# SPDX-License-Identifier: Apache-2.0
"""The table of convolutions: orders by kernels' names, places of shapes, and what a record's digests change."""

import csv
import json
import lzma
from pathlib import Path

import pytest

from fmtsim.machine.convolution import SHAPES
from tools import record_convolutions as tool
from tools.record_convolutions import Layer, main, order_of, table

IMAGE = Layer(2, 2, 64, 64, 8, 3, 1, 1)
LINE = IMAGE._replace(dims=1)
SM80 = "sm80_xmma_{}_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nchw_tilesize128x64x32_stage4_warpsize2x2x1_g1_kernel"
SM90 = "sm90_xmma_{}_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x64_warpgroupsize1x1x1_kernel"


@pytest.mark.parametrize(
    ("names", "layer", "which", "dtype", "order"),
    [
        (["nchwToNhwcKernel", SM90.format("fprop"), "nhwcToNchwKernel"], IMAGE, "forward", 1, "mma64"),
        ([SM90.format("dgrad")], IMAGE, "dgrad", 1, "mma64-"),
        ([SM80.format("dgrad")], IMAGE, "dgrad", 0, "mma32a"),
        ([SM80.format("dgrad")], IMAGE._replace(outputs=256), "dgrad", 0, None),
        ([SM80.format("fprop").replace("2x2x1", "2x2x2")], IMAGE, "forward", 1, None),
        ([SM80.format("fprop").replace("implicit", "indexed_implicit")], IMAGE, "forward", 1, None),
        (["implicit_convolve_sgemm<float>"], IMAGE, "forward", 0, "fma"),
        (["cudnn::cnn::wgrad_alg0_engine<float>"], IMAGE, "wgrad", 0, "images"),
        (["cudnn::cnn::wgrad_alg0_engine<float>"], IMAGE._replace(batch=3), "wgrad", 0, "atomic"),
        (["wgrad2d_shmem_tiling"], IMAGE, "wgrad", 1, "blocks8"),
        (["wgrad2d_shmem_tiling"], IMAGE._replace(side=16), "wgrad", 1, "risky blocks12"),
        (["wgrad2d_shmem_tiling"], LINE, "wgrad", 1, None),
        (["cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_wgrad_optimized_f16_64x64_32x5_nhwc>|z4", "another kernel"],
         IMAGE, "wgrad", 1, None),
        (["cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_wgrad_optimized_f16_64x64_32x5_nhwc>|z4", "splitKreduce"],
         IMAGE, "wgrad", 1, "cutlass32+4"),
        (["dgrad_engine<float>"], IMAGE._replace(kernel=2, stride=2, padding=0), "dgrad", 0, "sums"),
        (["dgrad_engine<float>"], IMAGE, "dgrad", 0, "atomic"),
        (["nvjet_hsh_64x8"], IMAGE._replace(kernel=1, padding=0), "forward", 1, "mma4096"),
        (["nvjet_hsh_64x8"], IMAGE, "forward", 1, None),
        ([], IMAGE, "forward", 1, None),
    ],
)  # fmt: skip
def test_orders_by_names(names, layer, which, dtype, order):
    assert order_of(names, layer, which, dtype) == order


def call(layer=IMAGE, which="forward", kernel="implicit_convolve_sgemm<float>", **facts):
    return {"layer": list(layer), "dtype": 0, "pass": which, "kernels": [kernel]} | facts


def rows(*calls):
    return [row.split(",") for row in lzma.decompress(table(list(calls))).decode().splitlines()]


def test_a_row_has_all_passes_of_a_shape():
    assert rows(call(), call(which="wgrad")) == [["image3/1+1", "64", "64", "2", "8", "fma - - - - - ? - -"]]
    assert rows(call(kernel="unheard of")) == [["image3/1+1", "64", "64", "2", "8", "? - - - - - - - -"]]
    assert rows(call(kernel="unheard of"), call())[0][-1].startswith("fma")
    assert rows(call(kernel="unheard of", probed="cutlass32/5"))[0][-1].startswith("cutlass32/5")


def test_digests_that_differ_mark_an_order():
    assert rows(call(same=False), call())[0][-1].startswith("! ")
    risky = {"layer": IMAGE._replace(side=16), "which": "wgrad", "kernel": "wgrad2d_shmem_tiling"}
    ends = [rows(call(**risky, **facts))[0][-1].split()[6] for facts in ({}, {"same": True}, {"same": False})]
    assert ends == ["?", "blocks12", "!"]


def test_a_transposed_convolution_is_the_gradient_of_another():
    up = IMAGE._replace(channels=32, kernel=2, stride=2, padding=0, transposed=True)
    kernel = "dgrad_engine<float>"
    assert rows(call(up, kernel=kernel)) == [["image2/2+0", "64", "32", "2", "16", "- - - sums - - - - -"]]
    assert rows(call(up._replace(groups=2), kernel=kernel)) == []


def test_forms_are_read_as_they_are_written():
    with lzma.open(SHAPES, "rt") as file:
        for form, channels, outputs, batch, side, _ in csv.reader(file):
            shape, *window, depthwise, groups, last = tool._FORM.fullmatch(form).groups()
            kernel, stride, padding, dilation = (int(size or 1) for size in window)
            groups = int(channels) if depthwise else int(groups or 1)
            sizes = map(int, (batch, channels, outputs, side))
            layer = Layer(1 + (shape == "image"), *sizes, kernel, stride, padding, dilation, groups, memory=last or "c")
            assert layer.form == form and layer.out > 0


def test_the_table_is_written_and_digests_are_compared(tmp_path, capsys):
    record, out = tmp_path / "a.json.xz", tmp_path / "a.csv.xz"
    patches = Layer(2, 2, 3, 32, 16, 8, 8, 0)
    seed, kind = 0, "normal"
    _, tensors = tool.operands(seed, patches, 1, "cpu")
    with tool.fmtsim.simulate(target="h200", strict=True):
        right = tool.digest(tool.called("forward", patches, *tensors))
    calls = [call(patches, dtype=1, seed=seed, kind=kind, digest=digest) for digest in (right, "0" * 16)]
    record.write_bytes(lzma.compress(json.dumps({"device": "a GPU", "calls": calls}).encode()))
    assert main([str(record), "--check"]) == 0 and "2 calls, 1 differ" in capsys.readouterr().out
    read = json.loads(lzma.decompress(record.read_bytes()))
    assert [each["same"] for each in read["calls"]] == [True, False] and read["device"] == "a GPU"
    assert main([str(record), "--out", str(out)]) == 0
    assert out.read_bytes() == table(read["calls"])


def test_a_record_of_an_h200_gives_rows_of_the_table_that_comes_with_fmtsim():
    """A twenty-fifth of the recorded layers."""
    record = Path(__file__).parents[1] / "machine" / "data" / "h200_convolutions.json.xz"
    rows = lzma.decompress(table(json.loads(lzma.decompress(record.read_bytes()))["calls"])).decode().splitlines()
    assert len(rows) > 150 and set(rows) <= set(lzma.decompress(SHAPES.read_bytes()).decode().splitlines())
