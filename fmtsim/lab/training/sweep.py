# SPDX-License-Identifier: Apache-2.0
"""Train a small model over and over: schemes x learning rates x widths x steps x seeds, each run a line of a file."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fmtsim
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.gemm.layers.config import PRODUCTS, LinearConfig, linear_config
from fmtsim.gemm.targets.doubts import collected_guesses
from fmtsim.lab.analysis.observe import observe
from fmtsim.lab.analysis.one_step import deterministic
from fmtsim.lab.search.switching import bits_of
from fmtsim.lab.training.corpus import Corpus, sample, score
from fmtsim.lab.training.decoders import GPTConfig
from fmtsim.lab.training.learner import autocast
from fmtsim.lab.training.run import begin, finite, rehearse, training_steps, validate
from fmtsim.lab.training.schemes import CLIP, FINAL_SHARE, HIGH_PRECISION, Scheme, TrainConfig
from fmtsim.lab.training.training_models import source_digest
from fmtsim.nn.operations import ModelMode
from fmtsim.recipes import Recipe, get_recipe, list_recipes
from fmtsim.recipes.serialization import recipe_to_dict
from fmtsim.spec.datapath import Datapath, IntegerDatapath, LogDatapath
from fmtsim.support.errors import ArgumentError, DataError, DtypeError, FmtsimError, did_you_mean, shown
from fmtsim.support.executors import AnyExecutor, open_tasks
from fmtsim.support.files import write_file, write_folder
from fmtsim.support.progress import Progress
from fmtsim.support.records import check_items, check_types, parse_json, read_file, read_value


def sharpness(logits: Tensor, targets: Tensor, eps: float = 5e-4) -> Tensor:
    """Return the largest relative rise of the cross entropy in a box around the logits, in percent.

    ``max (L(z + d) - L(z)) / (1 + L(z)) * 100`` over ``|d_i| <= eps (|z_i| + 1)``. The cross entropy is convex and
    rises with every logit but the target's, so the maximum is where these are at the top and the target's at the
    bottom: no search is needed.

    Args:
        logits: ``[..., classes]``, float32 or float64.
        targets: int64 ``[...]``, the class of each.
        eps: Half the relative width of the box.

    Returns:
        float64 ``[...]``. NaN logits give NaN.

    Source: Lee et al., To FP8 and Back Again, arXiv:2405.18710; the box is Keskar et al.'s, arXiv:1609.04836.

    Raises:
        ArgumentError: Shapes that do not fit, or an eps that is not above zero.
        DtypeError: Logits that are not floating point.

    >>> float(sharpness(torch.tensor([2.0, 0.0]), torch.tensor(0), eps=0.1)).__round__(3)
    5.056
    """
    if not logits.is_floating_point():
        raise DtypeError(f"logits have dtype {logits.dtype}; pass float32 or float64")
    if logits.dim() < 1 or targets.shape != logits.shape[:-1]:
        raise ArgumentError(
            f"targets of shape {tuple(targets.shape)} do not fit logits of shape {tuple(logits.shape)}; "
            "pass one class for each row of logits"
        )
    if not eps > 0:
        raise ArgumentError(f"eps={shown(eps)} is not a width of a box; pass a number above 0, such as 5e-4")
    z = logits.detach().double()
    room = eps * (z.abs() + 1)
    away = torch.full_like(z, 1.0).scatter(-1, targets.unsqueeze(-1), -1.0)
    before, after = _loss(z, targets), _loss(z + away * room, targets)
    return (after - before) / (1 + before) * 100


def _loss(z: Tensor, targets: Tensor) -> Tensor:
    return z.logsumexp(-1) - z.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


LOOKS = 10  # of the loss's sharpness in a run, evenly over its steps


class Point(NamedTuple):
    """Name one run: a scheme (``SweepConfig.scheme``), peak learning rate, width, steps, the seed of all draws."""

    scheme: str
    lr: float
    width: int
    steps: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """Say what all runs of a sweep have in common: sizes, batches, the schedule, device, text, and what multiplies."""

    layers: int = 2
    heads: int = 4
    context: int = 32
    batch_size: int = 8
    architecture: str = "gpt"
    final_rate: float = FINAL_SHARE
    clip: float | None = CLIP
    device: str = "cpu"
    target: str | Datapath | IntegerDatapath | LogDatapath | None = None

    def scheme(self, text: str) -> Scheme:
        """Return the scheme of a word of ``scheme_of`` on the target; behind ``@`` stands another value of a field."""
        word, _, change = text.partition("@")
        field, _, value = change.partition("=")
        target: Any = self.target
        target = dataclasses.replace(target, **{field: read_value(value)}) if field else target
        scheme = scheme_of(word)
        if scheme.recipe is not None and target is not None:
            recipe = scheme.recipe.on(target=target)
            return dataclasses.replace(scheme, recipe=recipe, target=target)
        return dataclasses.replace(scheme, target=target)

    def train_config(self, point: Point) -> TrainConfig:
        """Return the training of a point; it has no baseline of its own."""
        scheme = self.scheme(point.scheme)
        return TrainConfig(
            simulated=scheme, baseline=scheme, model=GPTConfig(
                context=self.context, width=point.width, layers=self.layers, heads=self.heads
            ), architecture=self.architecture, steps=point.steps, batch_size=self.batch_size, lr=point.lr,
            final_rate=self.final_rate, clip=self.clip, seed=point.seed, device=self.device,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """Hold what one run gave."""

    point: Point  # which run
    parameters: int  # weights, without embeddings
    tokens: int  # that were learnt from
    losses: tuple[float, ...]  # of each step, nats per byte
    validation: float  # loss on held-out text after the last step, NaN where the run stopped
    stopped: str | None = None  # why it ended early, None if it did not
    # at some steps (``LOOKS``), counted from 1: that of the loss at each byte of the step's batch, their mean, percent.
    # (Lee et al. take the last token of each sequence, which is noise where these are few.)
    sharpness: tuple[tuple[int, float], ...] = ()
    # on a text of tasks: how many held-out answers were right, and how many there were, by task
    tasks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # on a target: SQNR of each product of one more batch, dB, by layer and product, against exact sums of its operands
    products: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # wall time

    @property
    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps, infinite where the run stopped."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return math.inf if self.stopped or not tail else sum(tail) / len(tail)

    def to_line(self) -> str:
        """Return the run as a line of JSON; numbers that are not finite are null."""
        record = self.point._asdict() | {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:]}
        record["losses"] = [finite(loss) for loss in self.losses]
        record["sharpness"] = [(step, finite(value)) for step, value in self.sharpness]
        record["products"] = {name: finite(value) for name, value in self.products.items()}
        return json.dumps(record | {"validation": finite(self.validation)}, allow_nan=False) + "\n"

    @classmethod
    def of_line(cls, line: str) -> "SweepRun":
        """Return the run that a line describes."""
        record = parse_json(line)
        point = Point(*(record.pop(name) for name in Point._fields))
        losses = tuple(_number(loss) for loss in record.pop("losses"))
        looks = tuple((step, _number(value)) for step, value in record.pop("sharpness"))
        tasks = {name: (right, asked) for name, (right, asked) in record.pop("tasks").items()}
        products = {name: _number(value) for name, value in record.pop("products", {}).items()}
        values: dict[str, Any] = {
            "products": products,
            "losses": losses, "sharpness": looks, "tasks": tasks, "validation": _number(record.pop("validation")),
        }  # fmt: skip
        run = cls(point=point, **values, **record)
        check_items(point._asdict(), Point.__annotations__, "it")
        check_types(run)
        return run


def scheme_of(text: str) -> Scheme:
    """Return a scheme from a word of the command line.

    A recipe's name or file, a format (as in ``fmtsim train --format``), or two of either: ``A/B`` computes the forward
    product as A does and both products of the gradients as B does.

    Raises:
        FmtsimError: There is no such recipe or format, or a recipe of a pair has no linear layers.
    """
    forward, slash, backward = text.partition("/")
    if not slash or text.endswith(".json"):
        recipe = _recipe(text)
        return Scheme(format=text) if recipe is None else Scheme(format=HIGH_PRECISION, recipe=recipe)
    first, second = (linear_of(word) for word in (forward, backward))
    linear = dataclasses.replace(second, fprop=first.fprop)
    return Scheme(format=HIGH_PRECISION, recipe=Recipe(name=text, linear=linear, source="a pair of two schemes"))


def _recipe(word: str) -> Recipe | None:
    """Return the recipe that a word names, None for a format; float32 quantises nothing and is no recipe here."""
    if word == HIGH_PRECISION:
        return None
    if word.endswith(".json"):
        return get_recipe(word, kind="training")
    with contextlib.suppress(ArgumentError):
        return get_recipe(word, kind="training")
    try:
        get_format(word)
    except FmtsimError:
        hint = did_you_mean(word, [*list_recipes(kind="training"), *list_formats()])
        raise ArgumentError(
            f"scheme {shown(word)} is neither a recipe nor a format{hint}; fmtsim formats and fmtsim train --recipe "
            "list have the names"
        ) from None
    return None


def linear_of(word: str) -> LinearConfig:
    """Return how linear layers run under a recipe or format; ArgumentError where a recipe has none."""
    recipe = _recipe(word)
    if word == HIGH_PRECISION:
        return LinearConfig()
    linear = linear_config(x=word, w=word, g=word) if recipe is None else recipe.linear
    if not isinstance(linear, LinearConfig):
        raise ArgumentError(f"{word!r} has no linear layers to pair; choose another recipe, or a format")
    return linear


def speed_of(word: str, *, backward: bool) -> float:
    """Return how many times faster than in 16 bits a scheme's products are: 16 over the bits of their wider operand."""
    linear = linear_of(word)
    gemms = (linear.dgrad, linear.wgrad) if backward else (linear.fprop,)
    return 16 / max(bits_of(operand) for gemm in gemms for operand in (gemm.a, gemm.b))


def points_of(
    schemes: Sequence[str], rates: Sequence[float], widths: Sequence[int], steps: Sequence[int], seeds: Sequence[int]
) -> list[Point]:
    """Return every combination once, the first seed of all before the second, so that a part of a sweep is even."""
    lists = itertools.product(seeds, schemes, rates, widths, steps)
    points = [Point(scheme, lr, width, count, seed) for seed, scheme, lr, width, count in lists]
    return list(dict.fromkeys(points))


class _Logits(ModelMode):
    """Keep the logits and targets of every cross entropy that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def cross_entropy(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:
            self.seen.append((args[0].detach(), args[1]))
        return func(*args, **kwargs)


def train_point(config: SweepConfig, point: Point, corpus: Corpus) -> SweepRun:
    """Train one model; equal arguments give equal losses, bit for bit, on one machine with one number of threads."""
    began, train = time.perf_counter(), config.train_config(point)
    looks = {max(1, round(point.steps * look / LOOKS)) for look in range(1, LOOKS + 1)}
    sharp: list[tuple[int, float]] = []
    with collected_guesses(), deterministic(train.device):
        scheme = train.simulated
        parts = begin(scheme, train)
        run, model = parts.run, parts.learner.model
        watch = lambda step: _Logits() if step in looks else contextlib.nullcontext()  # noqa: E731
        for step, logits in training_steps(parts, scheme, train, corpus, watch):
            if logits is not None and logits.seen:
                z, targets = logits.seen[0]
                sharp.append((step, float(sharpness(z.float().flatten(0, -2), targets.flatten()).mean())))
        validation, tasks, products = math.nan, {}, dict[str, float]()
        if run.stopped is None:
            with autocast(scheme, train.device), _Logits() as logits:
                validation = validate(model, train, corpus)
            tasks = score([(z.argmax(-1), t) for z, t in logits.seen], train.model.context) if corpus.tasks else {}
            if train.simulated.emulated:
                batch = sample(corpus.train, train.batch_size, train.model.context, parts.batches, train.device)
                with autocast(scheme, train.device), observe(model) as seen:
                    model(*batch).backward()
                rows = [(layer, name, row) for layer, rows in seen.layers.items() for name, row in rows.items()]
                products = {f"{layer} {name}": row.sqnr_db for layer, name, row in rows if name in PRODUCTS}
    weights = sum(p.numel() for name, p in model.named_parameters() if not re.search("embedding|position", name))
    return SweepRun(
        point=point, parameters=weights, tokens=len(run.losses) * train.batch_size * train.model.context,
        losses=tuple(round(loss, 5) for loss in run.losses), validation=validation, stopped=run.stopped,
        sharpness=tuple(sharp), tasks=tasks, products=products, seconds=round(time.perf_counter() - began, 3),
    )  # fmt: skip


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


RUNS, SETTINGS = "runs.jsonl", "sweep.json"


def run_sweep(
    config: SweepConfig, points: Sequence[Point], corpus: Corpus, out: Path, progress: Progress, workers: int = 1,
    executor: AnyExecutor = None,
) -> list[SweepRun]:  # fmt: skip
    """Train the points whose runs a folder lacks; return the runs of all points, in the order of ``points``.

    This process writes each run as a line of ``runs.jsonl`` as soon as the run ends. A run has one CPU thread, so its
    bits do not depend on the number of processes: ``workers`` processes of this machine, or the workers of
    ``executor`` (``concurrent.futures.Executor``, ``dask://HOST:PORT``, ``ray://HOST:PORT``).

    Raises:
        ArgumentError: The folder holds a sweep of other settings; the message has the first one that differs.
        DataError: A file of the folder cannot be read or written.
        DeviceError: A process died, or no cluster answers.
    """
    # Write what decides the bits of a sweep, or compare it with what the folder has.
    schemes = {point.scheme for point in points}
    path = out / SETTINGS
    facts = {
        "fmtsim": fmtsim.__version__, "torch": torch.__version__, **asdict(config),
        "architecture_sha256": source_digest(config.architecture), "corpus": corpus.name,
        "corpus_sha256": corpus.sha256,
    }  # fmt: skip
    now = json.loads(json.dumps(facts))
    recipes = {name: scheme_of(name.partition("@")[0]).recipe for name in sorted(schemes)}
    definitions = {name: name if recipe is None else recipe_to_dict(recipe) for name, recipe in recipes.items()}
    try:
        before = parse_json(path.read_text(encoding="utf-8")) if path.exists() else now | {"schemes": {}}
        earlier = before.pop("schemes")
        pairs = [(f"scheme {name}", earlier[name], definitions[name]) for name in definitions if name in earlier]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{path} is not of a sweep ({error}); delete it, or choose another --out") from None
    for name, old, new in [*((name, before.get(name), value) for name, value in now.items()), *pairs]:
        if json.loads(json.dumps(new)) != old:
            raise ArgumentError(
                f"{out} holds a sweep of another {name} ({old!r:.60}, not {new!r:.60}); choose another --out, or "
                "pass the same options"
            )
    write_folder(out, {SETTINGS: json.dumps(now | {"schemes": earlier | definitions}, indent=1) + "\n"})
    runs = {run.point: run for run in read_runs(out)}
    waiting = [point for point in points if point not in runs]
    if waiting:
        first = {point.scheme: point for point in reversed(waiting)}
        with open_tasks((config, corpus), executor, workers=min(workers, len(waiting)), threads=1) as tasks:
            for point in first.values():  # options that do not fit fail here, and kernels are compiled once
                with collected_guesses(), deterministic(config.device):
                    rehearse(config.train_config(point._replace(steps=1)))
            progress.stage("runs", len(waiting))
            for done, (_, run) in enumerate(tasks.each_done(_train, waiting), 1):
                runs[run.point] = run
                write_file(out / RUNS, "".join(finished.to_line() for finished in runs.values()))
                progress.step(done, f"{run.point.scheme} lr {run.point.lr:g}: {run.final_loss:.3f}")
    return [runs[point] for point in points]


def read_runs(folder: Path) -> list[SweepRun]:
    """Return the runs of a folder; a last line that was cut short does not count.

    Raises:
        DataError: A line is no run.
    """
    path = folder / RUNS
    text = read_file(path, DataError).decode("utf-8", "replace") if path.exists() else ""
    whole = text.splitlines(keepends=True)
    runs = []
    for number, line in enumerate(whole, 1):
        if not line.endswith("\n"):
            break
        try:
            runs.append(SweepRun.of_line(line))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{path}, line {number} is no run ({error}); delete the line, or choose another --out"
            ) from None
    return runs


def _train(shared: tuple[SweepConfig, Corpus], point: Point) -> SweepRun:
    return train_point(shared[0], point, shared[1])
