# SPDX-License-Identifier: Apache-2.0
"""perplexity: what a language model makes of text, before and after quantisation."""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.nn.convert import convert
from fmtsim.ptq import ptq
from fmtsim.ptq.calibrate import batches_of, call, check_model, evaluating
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.recipe import Recipe
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.support.errors import ArgumentError, shown

_IGNORED = -100  # a label that does not count, as transformers has it


def perplexity(
    model: nn.Module,
    batches: Any,
    recipes: str | Path | Recipe | PtqRecipe | Sequence[str | Path | Recipe | PtqRecipe] = (),
    *,
    calibration_data: Any = None,
) -> Any:
    """Return the perplexity of a language model, with recipes also of copies: ``{"before": ..., name: ...}``.

    It is e to the mean negative log-likelihood of each token after those before it, over all tokens of all batches that
    count: the first of a row does not, nor do those where ``attention_mask`` is 0 or ``labels`` is -100. In evaluation
    mode; logits in float32, sums in float64. The model itself stays as it is.

    Args:
        model: A decoder whose output is logits [rows, tokens, vocabulary], has ``.logits``, or has them first or as
            ``"logits"``; a quantised or converted one is measured as it is.
        batches: Text to measure on: each batch token numbers [rows, tokens], or a dict of keywords with ``input_ids``;
            or one batch.
        recipes: Names, files or records of ``fmtsim.ptq``'s recipes and of ``fmtsim.convert``'s, or one.
        calibration_data: Batches for ``fmtsim.ptq``; recipes that need none go without.

    Raises:
        ArgumentError: A batch without token numbers or with nothing to predict, a model without logits, a recipe given
            twice; and what ``fmtsim.ptq`` and ``fmtsim.convert`` raise.

    >>> import torch, fmtsim
    >>> model = torch.nn.Sequential(torch.nn.Embedding(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 16))
    >>> list(fmtsim.lab.perplexity(model, [torch.arange(12).reshape(2, 6)], ["int8_token", "int4_g32"]))
    ['before', 'int8_token', 'int4_g32']
    """
    check_model("perplexity", model)
    listed = [recipes] if isinstance(recipes, str | Path | Recipe | PtqRecipe) else recipes
    batches = [batches] if isinstance(batches, Tensor) and batches.dim() == 2 else batches
    batches, records = batches_of(batches), [get_recipe(recipe) for recipe in listed]
    names = ["before", *(recipe.name for recipe in records)]
    if len(set(names)) < len(names):
        raise ArgumentError(f"recipes {', '.join(names[1:])}: names must differ, from each other and from 'before'")
    results = {"before": _measure(model, batches)}
    for recipe in records:  # each on a copy of the model as it was
        quantised = copy.deepcopy(model)
        if isinstance(recipe, PtqRecipe):
            ptq(quantised, recipe, calibration_data, progress=False)
        else:
            convert(quantised, recipe)
        results[recipe.name] = _measure(quantised, batches)
    return results if records else results["before"]


def to_perplexity(loss: float) -> float:
    """Return e to a loss in nats; infinite where that overflows, NaN of NaN."""
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else loss


def _measure(model: nn.Module, batches: list[Any]) -> float:
    total, count = 0.0, 0
    with evaluating(model), torch.no_grad():
        for i, batch in enumerate(batches):
            labels = read_labels(batch, i)
            logits = read_logits(call(model, batch, i, kind="batch"), labels)
            # The token at each position is predicted by the logits of the one before it.
            losses = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=_IGNORED, reduction="none"
            )
            total += float(losses.sum(dtype=torch.float64))
            count += int((labels[:, 1:] != _IGNORED).sum())
    if not count:
        raise ArgumentError("no batch has a token to predict; pass rows of 2 tokens or more that are not masked")
    return to_perplexity(total / count)


def read_labels(batch: Any, index: int) -> Tensor:
    """Return the token numbers [rows, tokens] of a batch, -100 where they do not count."""
    keywords = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = keywords.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        what = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else shown(ids)
        raise ArgumentError(
            f"batch {index} has {what} for token numbers; pass integers [rows, tokens], or a dict with 'input_ids'"
        )
    labels, mask = keywords.get("labels", ids), keywords.get("attention_mask")
    return labels if mask is None else labels.masked_fill(mask == 0, _IGNORED)


def read_logits(output: Any, labels: Tensor) -> Tensor:
    """Return the logits [rows, tokens, vocabulary] in a decoder's output."""
    # A field, a key, the first of a tuple, or the output itself.
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = output.get("logits") if isinstance(output, Mapping) else output
        logits = logits[0] if isinstance(logits, tuple | list) and logits else logits
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != labels.shape:
        what = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise ArgumentError(f"the model returned {what}, not logits {(*labels.shape, 'vocabulary')}; pass a decoder")
    return logits
