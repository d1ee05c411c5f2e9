# SPDX-License-Identifier: Apache-2.0
"""attribute: what each operand of each layer costs in loss."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.casts.arguments import takes
from fmtsim.gemm.layers.watch import watching
from fmtsim.lab.analysis.attribution import Attribution, AttributionRow
from fmtsim.lab.analysis.operand_probe import ALL, AttentionSite, Backward, Key, Probe, Site, sites_of
from fmtsim.nn.conversion import all_settings
from fmtsim.nn.convert import convert
from fmtsim.nn.modules import EmulatedModule
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
        with torch.random.fork_rng(self._devices):
            output = call(self.model, self._batch, kind="batch")
            return self._loss_of(output), self._logits_of(output)

    def measure(self, reference: Tensor | None) -> tuple[float, float | None]:
        """Return the loss, and the KL from a reference, of a pass without gradients."""
        with torch.no_grad():
            loss, logits = self.forward()
            return loss.item(), None if reference is None or logits is None else kl_of(logits, reference).item()

    def backward(self, probe: Probe, loss: Tensor, kind: Backward, *, again: bool = False) -> list[Tensor | None]:
        """Return the gradients of the parameters, float32 or wider."""
        self.backwards += 1
        for p in self.model.parameters():
            p.grad = None
        probe.backward(loss, kind, again=again)
        return [None if p.grad is None else _dense(p.grad) for p in self.parameters]

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

    def _loss_of(self, output: Any) -> Tensor:
        if self._loss is None:
            loss = output if isinstance(output, Tensor) else _field(output, "loss")
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ArgumentError(
                    f"the model returned {_described(output)}, in which there is no loss; "
                    "pass loss=lambda output: ..., a number that gradients go through"
                )
        elif takes(self._loss, output):
            loss = self._loss(output)
        else:
            loss = self._loss(output, self._batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or (torch.is_grad_enabled() and not loss.requires_grad):
            raise ArgumentError(
                f"loss= returned {_described(loss)}; return a tensor with one number that gradients go through"
            )
        return loss.reshape(())

    def _logits_of(self, output: Any) -> Tensor | None:
        logits = _field(output, "logits") if self._logits is None else self._logits(output)
        usable = isinstance(logits, Tensor) and logits.is_floating_point() and logits.dim() > 1 and logits.shape[-1] > 1
        if usable and (logits.requires_grad or not torch.is_grad_enabled()):
            return logits  # type: ignore[no-any-return]
        if self._logits is not None:
            raise ArgumentError(
                f"logits= returned {_described(logits)}; return [..., classes], two or more, that gradients go through"
            )
        self.why_no_kl = (
            f"no KL: the model returns {_described(output)}, and whether that holds logits cannot be told; "
            "pass logits=lambda output: ..."
        )
        return None


def kl_of(logits: Tensor, reference: Tensor) -> Tensor:
    """Return the mean over positions of ``KL(softmax(reference) || softmax(logits))`` in nats."""
    p, q = (F.log_softmax(t.flatten(0, -2).float(), -1) for t in (reference, logits))
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


def _dense(grad: Tensor) -> Tensor:
    dense = grad.to_dense() if grad.layout != torch.strided else grad
    return dense.clone() if dense.dtype == torch.float64 else dense.float()


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _described(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def attribute(
    model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None = None, recipe: Any = None, *, exact: bool = False,
    logits: Callable[[Any], Tensor] | None = None, generator: int = 0, progress: bool | None = None, **options: Any,
) -> Attribution:  # fmt: skip
    """Say what each operand of each layer costs: in loss, in KL of the outputs, in noise of the gradients.

    Everything is about one batch and the model as it is: rounding of an operand alone against no rounding, both in
    float32 arithmetic on no machine. Operands of the forward pass (``x_f w_f``, ``q k v p`` of quantised attention)
    have a loss and a KL. Those of the backward pass (``g_d w_d g_w x_w``) change neither; they have
    ``gradient_noise``, the squared error of the gradient of all Parameters relative to its square. That is what an
    optimizer sees: an error without bias adds to the noise of the batch, by its square.

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
    has_recipe, there = recipe is not None or bool(options), is_converted(model) or _attends(model)
    if has_recipe and there:
        raise ArgumentError(f"{type(model).__name__} is converted already; leave recipe= and other formats out")
    if not has_recipe and not there:
        raise ArgumentError(f"{type(model).__name__} is not converted; pass recipe= or format=, or call fmtsim.convert")
    fresh = not is_converted(model) and not _attends(model)
    with torch.inference_mode(False), torch.enable_grad():
        copied = copy.deepcopy(model)
        if fresh:
            convert(copied, recipe, **options)
        machine = _machine_note(copied)
        sites = sites_of(copied, 1000 * generator, fresh=fresh)
        if not sites:
            raise ArgumentError(f"no operand of {type(model).__name__} is rounded; choose another recipe")
        with make_progress(progress, verb="attribute") as show:
            return _attribute(Runs(copied, batch, loss, logits), sites, exact, generator, show, machine)


def _attribute(
    runs: Runs, sites: list[Site], exact: bool, seed: int, show: Progress, notes: list[str]
) -> Attribution:  # fmt: skip
    probe = Probe(sites, runs.samples, seed)
    with watching(probe):
        show.stage("passes", 4)
        probe.begin("plain")
        loss, logits = runs.forward()
        start = loss.item()
        sites, idle = [s for s in sites if s in probe.ran], [s for s in sites if s not in probe.ran and s.expected]
        if not math.isfinite(start):
            raise ArgumentError(_not_finite(runs, probe, start))
        plain = runs.backward(probe, loss, "first", again=exact or logits is not None)
        show.step(1)
        if exact:
            # The squared errors of all gradients, of a backward pass for each operand.
            keys, noise = _keys(sites, "backward"), dict[Key, float]()
            show.stage("operands of the backward pass", len(keys))
            for i, key in enumerate(keys):
                probe.injected = key
                moved = zip(runs.backward(probe, loss, "inject", again=i + 1 < len(keys)), plain, strict=True)
                noise[key] = sum(_square(x - y) for x, y in moved if x is not None and y is not None)
                show.step(i + 1)
        else:
            # Estimates of loss and KL, and of the squared errors of all gradients.
            if logits is not None:
                _scores(runs, probe, logits, seed)
            show.step(2)
            noise = _noise(runs, probe, [key for key in _keys(sites, "backward") if key[1] not in key[0].local], seed)
            show.step(3)
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
        # The changes of loss and KL, of a forward pass for each operand.
        keys, costs = _keys(sites, "forward"), dict[Key, Cost]()
        show.stage("operands of the forward pass", len(keys))
        for i, (site, operand) in enumerate(keys):
            site.install(operand)
            changed, kl = runs.measure(reference)
            site.install(None)
            sound = math.isfinite(changed)
            costs[site, operand] = (changed - start, kl) if sound else (math.inf, kl and math.inf)
            show.step(i + 1)
    for site in sites:
        site.install(ALL)
    rounded, kl = runs.measure(reference)
    total = sum(map(_square, plain)) or 1.0
    noise = {key: math.inf if key in probe.broken else square / total for key, square in noise.items()}
    rows = tuple(_row(site, name, costs, noise) for site in sites for name in site.formats)
    return Attribution(
        rows=rows, exact=exact, plain_loss=start, rounded_loss=rounded, rounded_kl=kl,
        passes=(runs.forwards, runs.backwards), notes=(*notes, *_notes(runs, probe, rows, loss.dtype, idle)),
    )  # fmt: skip


def _scores(runs: Runs, probe: Probe, logits: Tensor, seed: int) -> None:
    """Run backward passes from random directions of the logits, whose covariance is the KL's second derivative.

    With ``p = softmax(logits)`` that is ``diag(p) - p p^T``. Errors of rows are looked at one by one, and operands do
    not meet: half the mean of the squares is the KL, to second order.
    """
    p, source = logits.detach().float().softmax(-1), torch.Generator().manual_seed(seed)
    for i in range(_SCORES):
        wide = p.sqrt() * torch.randn(p.shape, generator=source).to(p)
        direction = wide - p * wide.sum(-1, keepdim=True)
        runs.backward(probe, (logits.float() * direction).sum(), "score", again=i + 1 < _SCORES)


def _noise(runs: Runs, probe: Probe, flows: list[Key], seed: int) -> dict[Key, float]:
    """Return the squared errors of all gradients, estimated.

    Let an error e of the gradient of an input x change the gradient of the Parameters by ``A e``. A forward pass along
    a random direction v of the Parameters moves x by ``A^T v``, and the square of ``<A^T v, e> = <v, A e>`` is
    ``|A e|^2`` in expectation. Rows of the batch are looked at one by one, so that their mean is near it.
    """
    if flows:
        source = torch.Generator().manual_seed(seed)
        along = [torch.randn(p.shape, generator=source).to(p) for p in runs.parameters]
        size, weight = (math.sqrt(sum(map(_square, ts))) for ts in (along, [p.detach() for p in runs.parameters]))
        step = _STEP.get(runs.parameters[0].dtype, _HALF_STEP) * (weight or 1.0) / size
        with _moved(runs.parameters, along, step), torch.no_grad():
            probe.begin("tangent", step)
            runs.forward()
    return {**probe.local, **{key: probe.flowing[key] for key in flows}}


def _keys(sites: list[Site], which: str) -> list[Key]:
    return [(site, name) for site in sites for name in getattr(site, which)]


def _row(site: Site, name: str, costs: Mapping[Key, Cost], noise: Mapping[Key, float]) -> AttributionRow:
    loss, kl = costs.get((site, name), (None, None))
    relative = noise.get((site, name), 0.0) if name in site.backward else None
    module = None if isinstance(site, AttentionSite) else site.module
    return AttributionRow(
        layer=site.name, operand=name, format=site.formats[name], loss=loss, kl=kl, gradient_noise=relative,
        module=module,
    )  # fmt: skip


def _notes(
    runs: Runs, probe: Probe, rows: tuple[AttributionRow, ...], dtype: torch.dtype, idle: list[Site]
) -> list[str]:  # fmt: skip
    notes = [runs.why_no_kl] if runs.why_no_kl else []
    if dtype.itemsize < 4:
        notes.append(f"the loss is {dtype}, which loses small changes of it: compute the loss in float32")
    notes += [f"not run by this batch: {', '.join(site.name for site in idle)}"] if idle else []
    broken = [f"{row.layer} {row.operand}" for row in rows if math.inf in (row.loss, row.gradient_noise)]
    notes += [f"rounding gives NaN or Inf: {', '.join(broken)}"] if broken else []
    names = ", ".join(sorted(probe.rerouted))
    notes += [f"first order alone, because rounding changes which rows they get: {names}"] if names else []
    return notes


def _not_finite(runs: Runs, probe: Probe, loss: float) -> str:
    probe.begin("finite")
    runs.measure(None)
    where = f"{probe.infinite} is the first that is NaN or Inf" if probe.infinite else "no layer that is rounded is"
    return f"the loss is {loss} without any rounding: {where}; look for it in the batch, the weights and loss="


def _machine_note(model: nn.Module) -> list[str]:
    """Return what of the model's arithmetic is not attributed to any operand."""
    configs = [m.emulation.config for m in model.modules() if isinstance(m, EmulatedModule) and m.emulation is not None]
    gemms = [gemm for config in configs for gemm in (config.fprop, config.dgrad, config.wgrad)]
    machines = {gemm.machine for gemm in gemms if gemm.machine}
    notes = [f"no row has what this costs: products {'; '.join(sorted(machines))}"] if machines else []
    if all_settings(model, "scaled") or all_settings(model, "saving"):
        notes.append(
            "the recipe exchanged operations, which stay, and whose gradients are not derivatives: estimates are poor, "
            "pass exact=True"
        )
    return notes


def _attends(model: nn.Module) -> bool:
    return bool(all_settings(model, "attention"))


@contextmanager
def _moved(parameters: list[nn.Parameter], along: list[Tensor], step: float) -> Iterator[None]:
    """Add a step along a direction to parameters, and take it back."""
    before = [p.data for p in parameters]
    for p, d in zip(parameters, along, strict=True):
        p.data = p.data + step * d
    try:
        yield
    finally:
        for p, data in zip(parameters, before, strict=True):
            p.data = data


def _square(t: Tensor | None) -> float:
    return 0.0 if t is None else float(t.float().square().sum())
