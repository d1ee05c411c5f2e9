# SPDX-License-Identifier: Apache-2.0
"""attribute: what each operand of each layer costs in loss."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.casts.arguments import takes
from fmtsim.gemm.layers.watch import watching
from fmtsim.lab.analysis.attribution import Attribution, AttributionRow
from fmtsim.lab.analysis.operand_probe import ALL, AttentionSite, Backward, Key, Probe, Site, before_of, list_sites
from fmtsim.nn.conversion import all_settings
from fmtsim.nn.convert import convert
from fmtsim.nn.state import is_converted
from fmtsim.ptq.calibrate import call, check_model
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.progress import Progress, make_progress

_STEP = {torch.float32: 1e-3, torch.float64: 1e-5}  # how far parameters are moved, relative to their norm
_HALF_STEP = 3e-2
_SCORES = 2  # backward passes for the KL
Cost = tuple[float, float | None]  # loss and KL


class Runs:
    """Run a model on one batch, from the same random state each time; arguments are those of ``attribute``.

    Attributes:
        parameters: Those whose gradients count.
        forwards, backwards: Passes so far.
        why_no_kl: Why there are no logits, empty where there are some.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Any, logits: Any) -> None:
        self.model, self._batch, self._loss, self._logits = model, batch, loss, logits
        parameters = [p for p in model.parameters() if p.is_floating_point()]
        if not any(p.requires_grad for p in parameters):  # a model that is used, not trained
            model.requires_grad_()
        self.parameters = [p for p in parameters if p.requires_grad]
        self.forwards = self.backwards = 0
        self.why_no_kl = ""
        self._devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return loss and logits of a forward pass."""
        self.forwards += 1
        with torch.random.fork_rng(self._devices):  # each pass draws the same numbers
            output = call(self.model, self._batch, kind="batch")
            # 1. The loss: of the caller's function, else the output itself or the field of that name.
            if self._loss is None:
                loss = output if isinstance(output, Tensor) else _field(output, "loss")
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    raise ArgumentError(
                        f"the model returned {_describe(output)}, in which there is no loss; "
                        "pass loss=lambda output: ..., a number that gradients go through"
                    )
            else:
                loss = self._loss(output) if takes(self._loss, output) else self._loss(output, self._batch)
            learns = not torch.is_grad_enabled() or (isinstance(loss, Tensor) and loss.requires_grad)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not learns:
                raise ArgumentError(
                    f"loss= returned {_describe(loss)}; return a tensor with one number that gradients go through"
                )
            # 2. The logits, whose KL is measured: at least two classes, and gradients have to reach them.
            logits = _field(output, "logits") if self._logits is None else self._logits(output)
            floats = isinstance(logits, Tensor) and logits.is_floating_point()
            if floats and logits.dim() > 1 and logits.shape[-1] > 1 and (
                logits.requires_grad or not torch.is_grad_enabled()
            ):  # fmt: skip
                return loss.reshape(()), logits
        if self._logits is not None:
            raise ArgumentError(
                f"logits= returned {_describe(logits)}; return [..., classes], two or more, that gradients go through"
            )
        self.why_no_kl = (
            f"no KL: the model returns {_describe(output)}, and whether that holds logits cannot be told; "
            "pass logits=lambda output: ..."
        )
        return loss.reshape(()), None

    def measure(self, reference: Tensor | None) -> tuple[float, float | None]:
        """Return the loss, and the KL from a reference, of a pass without gradients."""
        with torch.no_grad():
            loss, logits = self.forward()
            return loss.item(), None if reference is None or logits is None else kl_divergence(logits, reference).item()

    def backward(self, probe: Probe, loss: Tensor, kind: Backward, *, again: bool = False) -> list[Tensor | None]:
        """Return the gradients of the parameters, float32 or wider."""
        self.backwards += 1
        for p in self.model.parameters():
            p.grad = None
        probe.backward(loss, kind, again=again)
        gradients: list[Tensor | None] = []
        for p in self.parameters:
            dense = p.grad.to_dense() if p.grad is not None and p.grad.layout != torch.strided else p.grad
            # A copy: the next backward pass may add to the tensor itself.
            copied = dense if dense is None else dense.clone() if dense.dtype == torch.float64 else dense.float()
            gradients.append(copied)
        return gradients

    @property
    def samples(self) -> int:
        """Rows of the batch: the first size of its first tensor."""
        batch = self._batch
        if not isinstance(batch, Tensor | Mapping | tuple | list):
            raise ArgumentError(
                f"batch={shown(batch)} is not a batch; pass a tensor, a tuple of arguments or a dict of keywords"
            )
        values = batch.values() if isinstance(batch, Mapping) else batch
        tensors = [values] if isinstance(values, Tensor) else [t for t in values if isinstance(t, Tensor)]
        return next((t.shape[0] for t in tensors if t.dim() and t.shape[0]), 1)


def kl_divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """Return the mean over positions of ``KL(softmax(reference) || softmax(logits))`` in nats."""
    p, q = (F.log_softmax(t.flatten(0, -2).float(), -1) for t in (reference, logits))
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _describe(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def attribute(
    model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None = None, recipe: Any = None, *, exact: bool = False,
    logits: Callable[[Any], Tensor] | None = None, generator: int = 0, progress: bool | None = None, **options: Any,
) -> Attribution:  # fmt: skip
    """Say what each operand and product of each layer costs: in loss, in KL of the outputs, in noise of the gradients.

    Everything is about one batch and the model as it is: rounding of an operand alone against no rounding, both in
    float32 arithmetic on no machine. A product that a machine multiplies or that is rounded (``fprop dgrad wgrad``)
    is held to the product of the same rounded operands in float32. Operands of the forward pass (``x_f w_f``, ``q k v
    p`` of quantised attention) and ``fprop`` have a loss and a KL. Those of the backward pass (``g_d w_d g_w x_w``)
    change neither; they have ``gradient_noise``, the squared error of the gradient of all Parameters relative to its
    square. That is what an optimizer sees: an error without bias adds to the noise of the batch, by its square.

    The estimate is to second order: ``<g, e> + <g' - g, s e> / 2``, e being what an operand's rounding adds to its
    product, g the gradient there, and g' that of a pass in which the errors of all operands are added, each with a
    random sign s for each row of the batch (which cancels what operands do to each other). The KL is half the mean of
    ``<g, e>^2`` over gradients g from random directions of the logits that have its second derivative as covariance.
    Noise of ``g_w`` and ``x_w`` is that of the weight's gradient itself; noise of ``g_d`` and ``w_d``,
    which spreads to all layers below, comes from a forward pass along a random direction of the Parameters; errors that
    rows of the batch share are underestimated. It takes 4 forward and 4 backward passes (2 without KL), in which layers
    run their products some ten times. Batches of 8 rows and more are estimated better; the first size of tensors is
    taken for the rows.

    Args:
        model: A trained model, converted, or plain with ``recipe``. A copy runs, so that the model stays as it is; what
            it runs as (training or evaluation) stays too, with the same random state in each pass.
        batch: What the model takes: a tensor, a tuple of arguments, or a dict of keywords.
        loss: ``loss(output)`` or ``loss(output, batch)``, a number; None takes the output, or its ``loss``.
        recipe: As in ``convert``, for a plain model.
        exact: Switch the operands on one at a time: a forward pass each, or a backward pass.
        logits: ``logits(output)``, a tensor ``[..., classes]`` whose softmax the KL compares; None takes the output's
            ``logits``, and without there is no KL.
        generator: Seed of stochastic roundings and random rotations, each of which has one draw, and of the signs.
        progress: As in ``ptq``.
        options: ``format=``, ``target=``, ``filter_fn=`` ... of ``convert``, for a plain model.

    Returns:
        Rows with costs, ``worst``, ``rules`` and more. Deterministic for a seed, on one device and number of threads.
        An operand whose rounding gives NaN or Inf costs infinity; a note names it.

    Raises:
        ArgumentError: Nothing is rounded, the model is not converted and no recipe is given (or both), a batch or loss
            that does not fit, or a loss that is not finite without any rounding: the message says at which layer.

    >>> from fmtsim.lab.training.decoders import GPT, GPTConfig
    >>> model = GPT(GPTConfig(context=8, width=32, layers=1, heads=2, vocabulary=16), seed=0)
    >>> tokens = torch.arange(32).reshape(4, 8) % 16
    >>> found = attribute(model, (tokens, tokens.roll(-1, 1)), format="e2m1")
    >>> found.worst(1)[0].operand in ("x_f", "w_f"), len(found.rows)
    (True, 30)
    """
    check_model("attribute", model)
    for name, function in (("loss", loss), ("logits", logits)):
        if function is not None and not callable(function):
            raise ArgumentError(f"{name}={shown(function)} is not a function; write {name}=lambda output: ...")
    if type(generator) is not int or generator < 0:
        raise ArgumentError(f"attribute generator={shown(generator)} is not a seed; pass a whole number from 0")
    # 1. A converted model, or a plain one with a recipe.
    has_recipe, converted = recipe is not None or bool(options), is_converted(model)
    converted = converted or bool(all_settings(model, "attention"))
    if has_recipe and converted:
        raise ArgumentError(f"{type(model).__name__} is converted already; leave recipe= and other formats out")
    if not has_recipe and not converted:
        raise ArgumentError(f"{type(model).__name__} is not converted; pass recipe= or format=, or call fmtsim.convert")
    with torch.inference_mode(False), torch.enable_grad():
        copied = copy.deepcopy(model)
        if not converted:
            convert(copied, recipe, **options)
        # 2. Note what of the model's arithmetic is not attributed to any operand.
        attentions = [site.call.config.target for site in all_settings(copied, "attention")]
        unseen = "no row has what the products of attention cost on their target (fmtsim.observe has their SQNR)"
        notes = [unseen] if any(attentions) else []
        if all_settings(copied, "scaled") or all_settings(copied, "saving"):
            notes.append(
                "the recipe exchanged operations, which stay, and whose gradients are not derivatives: estimates are "
                "poor, pass exact=True"
            )
        # 3. Take all rounding away, and measure what each operand's brings back.
        sites = list_sites(copied, 1000 * generator, fresh=not converted)
        if not sites:
            raise ArgumentError(f"no operand of {type(model).__name__} is rounded; choose another recipe")
        with make_progress(progress, verb="attribute") as show:
            return _attribute(Runs(copied, batch, loss, logits), sites, exact, generator, show, notes)


def _attribute(runs: Runs, sites: list[Site], exact: bool, seed: int, show: Progress, notes: list[str]) -> Attribution:
    probe = Probe(sites, runs.samples, seed)
    with watching(probe):
        # 1. A pass that rounds nothing: its loss, its gradients, and the errors that each operand would have.
        show.stage("passes", 4)
        probe.begin("plain")
        loss, logits = runs.forward()
        start = loss.item()
        sites, idle = [s for s in sites if s in probe.ran], [s for s in sites if s not in probe.ran and s.expected]
        if not math.isfinite(start):
            probe.begin("finite")  # one more pass finds where it begins
            runs.measure(None)
            where = (
                f"{probe.infinite} is the first that is NaN or Inf" if probe.infinite else "no layer that is rounded is"
            )
            raise ArgumentError(
                f"the loss is {start} without any rounding: {where}; look for it in the batch, the weights and loss="
            )
        plain = runs.backward(probe, loss, "first", again=exact or logits is not None)
        show.step(1)
        if exact:
            # 2. The squared errors of all gradients, of a backward pass for each operand.
            keys, noise = _keys(sites, "backward"), dict[Key, float]()
            show.stage("operands of the backward pass", len(keys))
            for i, key in enumerate(keys):
                probe.injected = key
                moved = zip(runs.backward(probe, loss, "inject", again=i + 1 < len(keys)), plain, strict=True)
                noise[key] = sum(_square(x - y) for x, y in moved if x is not None and y is not None)
                show.step(i + 1)
        else:
            # 2. Estimate the KL: to second order half the mean of the squares of scores.
            if logits is not None:
                _score(runs, probe, logits, seed)
            show.step(2)
            # 3. Estimate the squared errors of all gradients.
            noise = _noise(runs, probe, [key for key in _keys(sites, "backward") if key[1] not in key[0].local], seed)
            show.step(3)
            # 4. A pass with all errors added at random signs gives the second order of the loss.
            probe.begin("shifted")
            runs.backward(probe, runs.forward()[0], "loss")
            show.step(4)
            costs: dict[Key, Cost] = {}
            for key in _keys(sites, "forward"):
                second = 0.0 if key[0].name in probe.rerouted else probe.second[key]
                kl = None if logits is None else probe.score[key] / (2 * _SCORES * logits[..., 0].numel())
                broken = key in probe.broken
                costs[key] = (math.inf, kl and math.inf) if broken else (probe.first[key] + second / 2, kl)
    reference = None if logits is None else logits.detach()
    if exact:
        # 3. The changes of loss and KL, of a forward pass for each operand.
        keys, costs = _keys(sites, "forward"), dict[Key, Cost]()
        show.stage("operands of the forward pass", len(keys))
        for i, (site, operand) in enumerate(keys):
            before, outputs = start, reference
            if (base := before_of(operand)) is not None:  # a product on its machine comes after its operands
                site.install(base)
                with torch.no_grad():
                    loss, outputs = runs.forward()
                before = loss.item()
            site.install(operand)
            changed, kl = runs.measure(outputs)
            site.install(None)
            sound = math.isfinite(changed)
            costs[site, operand] = (changed - before, kl) if sound else (math.inf, kl and math.inf)
            show.step(i + 1)
    # 5. All operands of the forward pass together, and then with products on their machines.
    for site in sites:
        site.install(ALL)
    rounded, kl = runs.measure(reference)
    simulated = rounded
    if any("fprop" in site.forward for site in sites):
        for site in sites:
            site.install(site.whole)
        simulated, kl = runs.measure(reference)
    total = sum(map(_square, plain)) or 1.0
    noise = {key: math.inf if key in probe.broken else square / total for key, square in noise.items()}
    rows = []
    for site in sites:
        for name in site.formats:
            change, divergence = costs.get((site, name), (None, None))
            rows.append(AttributionRow(
                layer=site.name, operand=name, format=site.formats[name], loss=change, kl=divergence,
                gradient_noise=noise.get((site, name), 0.0) if name in site.backward else None,
                module=None if isinstance(site, AttentionSite) else site.module,
            ))  # fmt: skip
    return Attribution(
        rows=tuple(rows), exact=exact, plain_loss=start, rounded_loss=rounded, simulated_loss=simulated, rounded_kl=kl,
        passes=(runs.forwards, runs.backwards), notes=(*notes, *_notes(runs, probe, rows, loss.dtype, idle)),
    )  # fmt: skip


def _notes(runs: Runs, probe: Probe, rows: list[AttributionRow], dtype: torch.dtype, idle: list[Site]) -> list[str]:
    """Return what was left out or could not be told."""
    notes = [runs.why_no_kl] if runs.why_no_kl else []
    if dtype.itemsize < 4:
        notes.append(f"the loss is {dtype}, which loses small changes of it: compute the loss in float32")
    notes += [f"not run by this batch: {', '.join(site.name for site in idle)}"] if idle else []
    unsound = [f"{row.layer} {row.operand}" for row in rows if math.inf in (row.loss, row.gradient_noise)]
    notes += [f"rounding gives NaN or Inf: {', '.join(unsound)}"] if unsound else []
    names = ", ".join(sorted(probe.rerouted))
    notes += [f"first order alone, because rounding changes which rows they get: {names}"] if names else []
    return notes


def _score(runs: Runs, probe: Probe, logits: Tensor, seed: int) -> None:
    """Run backward passes from random directions of the logits, whose covariance is the KL's second derivative."""
    # With p = softmax(logits) that is diag(p) - p p^T. Errors of rows are looked at one by one.
    p, source = logits.detach().float().softmax(-1), torch.Generator().manual_seed(seed)
    for i in range(_SCORES):
        wide = p.sqrt() * torch.randn(p.shape, generator=source).to(p)
        direction = wide - p * wide.sum(-1, keepdim=True)
        runs.backward(probe, (logits.float() * direction).sum(), "score", again=i + 1 < _SCORES)


def _noise(runs: Runs, probe: Probe, flows: list[Key], seed: int) -> dict[Key, float]:
    """Return the squared errors of all gradients, estimated."""
    # Let an error e of the gradient of an input x change the gradient of the Parameters by A e. A forward pass along a
    # random direction v of the Parameters moves x by A^T v, and the square of <A^T v, e> = <v, A e> is |A e|^2 in
    # expectation. Rows of the batch are looked at one by one, so that their mean is near it.
    if flows:
        source = torch.Generator().manual_seed(seed)
        along = [torch.randn(p.shape, generator=source).to(p) for p in runs.parameters]
        size, weight = (math.sqrt(sum(map(_square, ts))) for ts in (along, [p.detach() for p in runs.parameters]))
        step = _STEP.get(runs.parameters[0].dtype, _HALF_STEP) * (weight or 1.0) / size
        before = [p.data for p in runs.parameters]
        try:
            for p, direction in zip(runs.parameters, along, strict=True):
                p.data = p.data + step * direction
            with torch.no_grad():
                probe.begin("tangent", step)
                runs.forward()
        finally:
            for p, data in zip(runs.parameters, before, strict=True):
                p.data = data
    return {**probe.local, **{key: probe.flowing[key] for key in flows}}


def _keys(sites: list[Site], which: str) -> list[Key]:
    return [(site, name) for site in sites for name in getattr(site, which)]


def _square(t: Tensor | None) -> float:
    return 0.0 if t is None else float(t.float().square().sum())
