# SPDX-License-Identifier: Apache-2.0
"""Post-training quantisation: a trained model, a recipe, a few batches, and a quantised model with a report."""

from fmtsim.ptq.cache import QuantisedCache
from fmtsim.ptq.ptq_report import PtqReport, PtqRow
from fmtsim.ptq.quantize_model import ptq
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.ptq_methods import Awq, Calibration, Clip, Equalise, Gptq, Hqq, LearnedRounding, Rotate, Smooth

__all__ = [
    "Awq", "Calibration", "Clip", "Equalise", "Gptq", "Hqq", "LearnedRounding", "PtqRecipe", "PtqReport", "PtqRow",
    "QuantisedCache", "Rotate", "Smooth", "ptq",
]  # fmt: skip
