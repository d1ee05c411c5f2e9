# SPDX-License-Identifier: Apache-2.0
"""The models of the claims about widths, before they are trained."""

import torch

from fmtsim.lab.reproduce.widths import _VOCABULARY, _MuGPT, text


def test_tokens_and_their_positions_enter_a_model_with_unit_variance():
    torch.manual_seed(0)
    model = _MuGPT(256, 0, 0.3)
    seen = []
    model.norm.register_forward_pre_hook(lambda norm, given: seen.append(given[0].detach()))
    assert model(text(64, 32, 1)).shape == (64, 32, _VOCABULARY)
    assert 0.95 < float(seen[0].var()) < 1.05  # of 64 + 32 vectors of 256 random numbers
