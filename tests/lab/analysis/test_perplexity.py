# SPDX-License-Identifier: Apache-2.0
"""perplexity, before and after, against the sum over tokens written out."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim import lab
from fmtsim.support.errors import ArgumentError
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("one_thread")


class Decoder(nn.Module):
    """Predict tokens from the one before, and return them as transformers does, or otherwise."""

    def __init__(self, wrap=lambda logits: SimpleNamespace(logits=logits)):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.lm_head = nn.Embedding(24, 32), nn.Linear(32, 64), nn.Linear(64, 24)
        self.wrap, self.dropout = wrap, nn.Dropout(0.5)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.wrap(self.lm_head(self.dropout(torch.relu(self.up(self.embed(input_ids))))) * 8)


IDS = [torch.randint(24, (3, n), generator=torch.Generator().manual_seed(n)) for n in (5, 9)]


def written_out(model, ids, counts):
    nats, count = 0.0, 0
    with torch.no_grad():
        for batch, counted in zip(ids, counts, strict=True):
            p = model.eval()(batch).logits.double().softmax(-1)
            for row in range(batch.shape[0]):
                for i in range(1, batch.shape[1]):
                    if counted[row][i]:
                        nats -= math.log(p[row, i - 1, batch[row, i]])
                        count += 1
    return math.exp(nats / count)


def test_it_is_that_of_every_token_after_those_before():
    model = Decoder()
    everything = [torch.ones_like(ids) for ids in IDS]
    assert lab.perplexity(model, IDS) == pytest.approx(written_out(Decoder(), IDS, everything), rel=1e-6)
    assert lab.perplexity(model, IDS[0]) == lab.perplexity(model, [IDS[0]])
    assert model.training  # put back
    masks = [(torch.arange(ids.numel()).reshape(ids.shape) % 4 > 0).long() for ids in IDS]
    batches = [{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(IDS, masks, strict=True)]
    expected = pytest.approx(written_out(Decoder(), IDS, masks), rel=1e-6)
    assert lab.perplexity(model, batches) == expected
    batches = [
        {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)} for ids, mask in zip(IDS, masks, strict=True)
    ]
    assert lab.perplexity(model, batches) == expected


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: (y, None), lambda y: {"logits": y}])
def test_logits_come_in_several_shapes(wrap):
    assert lab.perplexity(Decoder(wrap), IDS) == lab.perplexity(Decoder(), IDS)


def test_recipes_run_on_copies():
    model = Decoder()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = lab.perplexity(model, IDS, ["int4_g32", "int8_static", "te_current"], calibration_data=IDS)
    assert list(found) == ["before", "int4_g32", "int8_static", "te_current"]
    for name, value in found.items():
        other = Decoder()
        if name == "te_current":
            fmtsim.convert(other, recipe=name)
        elif name != "before":
            fmtsim.ptq(other, name, IDS)
        assert lab.perplexity(other, IDS) == value
    assert len(set(found.values())) == 4
    assert lab.perplexity(model, IDS, "int4_g32") == {name: found[name] for name in ("before", "int4_g32")}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()) and type(model) is Decoder


def test_what_has_no_perplexity_is_refused():
    model = Decoder()
    for batch, text in (
        (torch.ones(2, 3), r"batch 0 has torch.float32 \(2, 3\) for token numbers; pass integers \[rows, tokens\]"),
        ({"labels": IDS[0]}, r"batch 0 has None for token numbers; pass integers"),
        (IDS[0][:, :1], "no batch has a token to predict; pass rows of 2 tokens or more"),
    ):
        refused(text, lab.perplexity, model, [batch])
    with pytest.raises(ArgumentError, match=r"the model returned \(3, 5, 1, 24\), not logits \(3, 5, 'vocabulary'\)"):
        lab.perplexity(Decoder(lambda y: y[:, :, None]), IDS)
    refused("recipes int4_g32, int4_g32: names must differ", lab.perplexity, model, IDS, ["int4_g32", "int4_g32"])
    refused("needs calibration_data=", lab.perplexity, model, IDS, ["int8_static"])
