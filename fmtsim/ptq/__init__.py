# SPDX-License-Identifier: Apache-2.0
"""Post-training quantisation: a trained model, a recipe, a few batches, and a quantised model with a report."""

from fmtsim.ptq.cache import QuantisedCache
from fmtsim.ptq.catalogue import (
    get_ptq_recipe,
    list_ptq_recipes,
    load_ptq_recipe,
    ptq_recipe_from_dict,
    ptq_recipe_to_dict,
    register_ptq_recipe,
    save_ptq_recipe,
)
from fmtsim.ptq.report import PtqReport, PtqRow, ptq_report
from fmtsim.ptq.spec import Calibration, Equalise, Gptq, LearnedRounding, PtqRecipe, Smooth
from fmtsim.ptq.state import load_ptq, ptq_state
from fmtsim.ptq.verb import ptq

__all__ = [
    "Calibration", "Equalise", "Gptq", "LearnedRounding", "PtqRecipe", "PtqReport", "PtqRow", "QuantisedCache",
    "Smooth", "get_ptq_recipe", "list_ptq_recipes", "load_ptq", "load_ptq_recipe", "ptq", "ptq_recipe_from_dict",
    "ptq_recipe_to_dict", "ptq_report", "ptq_state", "register_ptq_recipe", "save_ptq_recipe",
]  # fmt: skip
