# SPDX-License-Identifier: Apache-2.0
"""Claims about models that are trained first and quantised then: text on Gaudi, FP8's weights in INT8, images."""

import copy
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.formats.element import IntFormat
from fmtsim.formats.scaling import Scaling
from fmtsim.lab.training.corpus import load_corpus
from fmtsim.lab.training.decoders import GPT, GPTConfig
from fmtsim.nn.convert import convert, revert
from fmtsim.ptq import ptq
from fmtsim.ptq.calibrate import evaluating
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.ptq_catalogue import minifloat, operand
from fmtsim.recipes.ptq_methods import Calibration
from studies.claims.claim import Claim, Expected, Measured, Tell, settings
from studies.claims.experiment import decibels, generator, last_loss, relative_error, told
from studies.claims.multipliers import luts

_GAUDI = "Intel, FP8 inference on Gaudi, arXiv:2503.09975 (abstract): less than 1 % of accuracy lost"
_QUALCOMM = "van Baalen et al., FP8 versus INT8, arXiv:2303.17951, section on networks trained in FP8"
_FPGA = "Aggarwal et al., minifloats on FPGAs, arXiv:2311.12359, abstract of the first version"
_LENGTH = 64

Points = dict[str, tuple[float, float]]  # cost, and answers changed in percent


@lru_cache(maxsize=4)
def trained_text(recipe: str | None, steps: int, width: int, seed: int) -> GPT:
    """Return a GPT trained on the bytes of Python's standard library, under a recipe where one is named."""
    data = load_corpus(None, _LENGTH).train
    model, source = GPT(GPTConfig(context=_LENGTH, width=width, layers=2, heads=4), seed), generator(seed)
    if recipe is not None:
        convert(model, recipe, generator=seed, filter_fn=GPT.without_head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def prepare(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)

    last_loss(steps, 1, lambda step: model(*_windows(data, 16, source)), optimizer, prepare)
    return model if recipe is None else revert(model)


def _windows(data: Tensor, count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    places = torch.randint(data.numel() - _LENGTH - 1, (count,), generator=source)
    tokens = data[places[:, None] + torch.arange(_LENGTH + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def _right(model: GPT, batches: list[tuple[Tensor, Tensor]]) -> float:
    answers: list[Tensor] = []
    hook = model.norm.register_forward_hook(lambda module, args, y: answers.append(y))
    with evaluating(model), torch.no_grad():
        for tokens, targets in batches:
            model(tokens, targets)
    hook.remove()
    guesses = (torch.cat(answers) @ model.embedding.weight.mT).argmax(-1)
    return 100 * float((guesses == torch.cat([targets for _, targets in batches])).double().mean())


def served_text(
    tell: Tell, *, schemes: tuple[str, ...], trained: tuple[str | None, ...], steps: int, width: int, seed: int
) -> Measured:
    """Train on text, quantise by each scheme, and count the bytes guessed right in the held-out tenth."""
    held_out, numbers = load_corpus(None, _LENGTH).validation, {}
    test = [_windows(held_out, 64, generator(seed + 1000 + i)) for i in range(32)]
    data = [_windows(load_corpus(None, _LENGTH).train, 16, generator(seed + 500 + i)) for i in range(4)]
    for recipe, scheme in told(tell, list(product(trained, (None, *schemes)))):
        before = "" if len(trained) == 1 else f"{recipe}, "
        model = trained_text(recipe, steps, width, seed)
        if scheme is None:
            exact = numbers[f"{before}right, %"] = _right(model, test)
        else:
            right = _right(ptq(copy.deepcopy(model), scheme, data, progress=False), test)
            numbers[f"{before}{scheme}: part lost, %"] = 100 * (1 - right / exact)
    losses = [value for name, value in numbers.items() if "lost" in name]
    return Measured(numbers=numbers | {"largest part lost, %": max(losses)})


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images [count, 1, 16, 16] of eight kinds of strokes at random places, and their kinds."""
    source = generator(seed)
    kinds = torch.randint(8, (count,), generator=source)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    middle = 5 + 6 * torch.rand(2, count, 1, 1, generator=source)
    dy, dx = y - middle[0], x - middle[1]
    angle = kinds[:, None, None] * torch.pi / 8
    across, along = dy * angle.cos() - dx * angle.sin(), dy * angle.sin() + dx * angle.cos()
    stroke = ((across.abs() < 1) & (along.abs() < 5)).float() * (0.3 + torch.rand(count, 1, 1, generator=source))
    return (stroke + 0.25 * torch.randn(count, 16, 16, generator=source))[:, None], kinds


@lru_cache(maxsize=8)
def trained_images(seed: int, steps: int) -> nn.Module:
    """Return a small convolutional network that tells the kinds of ``images`` apart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(),
            nn.Linear(64, 8),
        )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss_of(step: int) -> Tensor:
        x, kinds = images(64, 10_000 * (seed + 1) + step)
        return F.cross_entropy(model(x), kinds)

    last_loss(steps, 1, loss_of, optimizer)
    return model.requires_grad_(False)


def formats(widths: tuple[int, ...]) -> dict[str, Any]:
    """Return integers and minifloats of these widths by name; E1My is an integer whose sign is apart."""
    records: dict[str, Any] = {f"int{bits}": IntFormat(name=f"int{bits}_symmetric", bits=bits) for bits in widths}
    return records | {
        f"e{e}m{bits - 1 - e}": minifloat(e, bits - 1 - e) for bits in widths for e in range(2, min(bits, 6))
    }


def scheme_of(name: str, fmt: Any) -> PtqRecipe:
    """Return static quantisation of both operands to a format: inputs by tensor, weights by channel."""
    x, w = operand(fmt, Scaling()), operand(fmt, Scaling(block=(1, None)))
    return PtqRecipe(name=name, x=x, w=w, calibration=Calibration())


def pareto(tell: Tell, *, widths: tuple[int, ...], steps: int, seed: int) -> Measured:
    """Quantise a network of images to integers and minifloats, and set the answers that change against the cost."""
    model, (x, _), (test, kinds) = trained_images(seed, steps), images(256, seed + 1), images(2048, seed + 2)
    exact = model(test).argmax(1)
    points: Points = {}
    for name, fmt in told(tell, list(formats(widths).items())):
        answers = ptq(copy.deepcopy(model), scheme_of(name, fmt), [x], progress=False)(test).argmax(1)
        points[name] = luts(fmt), 100 * float((answers != exact).double().mean())
    numbers = _numbers_of(points, widths)
    least = _front({name: (luts(fmt, least=True), points[name][1]) for name, fmt in formats(widths).items()})
    numbers["integers on the front, least tables, %"] = _integers(least)
    numbers["right, %"] = 100 * float((exact == kinds).double().mean())
    kinds_of = {"front": _front(points), "integers": _of(points, "i"), "minifloats": _of(points, "e")}
    curves = {
        label: sorted((cost, max(lost, 0.01)) for cost, lost in (points[name] for name in names))
        for label, names in kinds_of.items()
    }
    axes = ("LUTs of a multiply-accumulate", "answers changed, %")
    return Measured(numbers=numbers, curves=curves, axes=axes, logarithmic="xy")


def vision(tell: Tell, *, schemes: tuple[str, ...], steps: int, seed: int) -> Measured:
    """Quantise a network of images by each scheme: how large its answers are beside their errors, and which change."""
    model, (x, _), (test, kinds) = trained_images(seed, steps), images(256, seed + 1), images(2048, seed + 2)
    exact = model(test)
    numbers = {"right, %": 100 * float((exact.argmax(1) == kinds).double().mean())}
    for scheme in told(tell, schemes):
        answers = ptq(copy.deepcopy(model), scheme, [x], progress=False)(test)
        numbers[f"{scheme}, dB"] = decibels(relative_error(exact, answers))
        numbers[f"{scheme}: changed, %"] = 100 * float((answers.argmax(1) != exact.argmax(1)).double().mean())
    first, second = schemes[:2]
    numbers[f"{first} over {second}, dB"] = numbers[f"{first}, dB"] - numbers[f"{second}, dB"]
    return Measured(numbers=numbers)


def _of(points: Points, first: str) -> list[str]:
    return [name for name in points if name.startswith(first)]


def _front(points: Points) -> list[str]:
    """Return the points that no other one beats in cost without losing more, or the other way round."""
    return [
        name for name, (cost, lost) in points.items()
        if not any(c <= cost and less <= lost and (c, less) != (cost, lost) for c, less in points.values())
    ]  # fmt: skip


def _integers(front: list[str]) -> float:
    return 100 * sum(name.startswith("i") for name in front) / len(front)


def _numbers_of(points: Points, widths: tuple[int, ...]) -> dict[str, float]:
    front = _front(points)
    numbers = {f"{name}: changed, %": lost for name, (_, lost) in points.items()}
    numbers["on the front"] = float(len(front))
    numbers["integers on the front, %"] = _integers(front)
    numbers["integers of all, %"] = 100 * len(widths) / len(points)
    for bits in widths:
        least = min(points[name][1] for name in _of(points, "e") if int(name[1]) + int(name[3]) + 1 == bits)
        numbers[f"{bits} bits: least changed by minifloats - by integers, points"] = least - points[f"int{bits}"][1]
    return numbers


_SHEN = "Shen et al., Efficient Post-training Quantization with FP8 Formats, arXiv:2309.14592, abstract"
_METHODS = ("gaudi2_hw", "gaudi3_hw", "gaudi_pow2", "gaudi_opt_channel", "gaudi_exact", "gaudi_dynamic_token")

CLAIMS = (
    Claim(
        name="gaudi_text", recorded="shown in part", bounds="source", slow=True,
        says="a language model in FP8 under Gaudi's scales loses less than 1 % of its accuracy",
        source=_GAUDI,
        measure=served_text,
        settings=settings(schemes=(*_METHODS, "gaudi2_fixed", "w4a4"), trained=(None,), steps=1000, width=96, seed=0),
        expected=(
            *(Expected(name=f"{name}: part lost, %", high=1.0) for name in _METHODS),
            Expected(name="gaudi2_fixed: part lost, %"),
            Expected(name="w4a4: part lost, %", low=1.0),
            Expected(name="right, %", low=45.0),
        ),
        notes="a GPT of 0.25 million parameters, 1000 steps of 1024 bytes of Python's standard library, and 131,072 "
        "bytes held out; it has none of the outliers of models a thousand times as large, and its head is exact. "
        "Four bits are the control that loses more",
    ),
    Claim(
        name="fp8_to_int8", recorded="shown in part", bounds="before", slow=True,
        says="a network trained in FP8 keeps its accuracy in INT8",
        source=_QUALCOMM,
        measure=served_text,
        settings=settings(
            schemes=("int8_static", "int8_token", "e4m3_static", "w4a4"), trained=("amp_bf16", "te_current"), steps=500,
            width=96, seed=0,
        ),
        expected=(
            Expected(name="te_current, int8_static: part lost, %", high=1.0),
            Expected(name="te_current, int8_token: part lost, %", high=1.0),
            Expected(name="te_current, e4m3_static: part lost, %"),
            Expected(name="te_current, w4a4: part lost, %", low=1.0),
        ),
        notes="a direction on a GPT of 0.25 million parameters, 500 steps of 1024 bytes; the source has networks of "
        "images and a transformer, whose outliers cost INT8 more",
    ),
    Claim(
        name="minifloat_fpga", recorded="not shown", bounds="after", slow=True,
        says="integers are often Pareto-optimal once hardware counts, though minifloats of a width change fewer",
        source=_FPGA,
        measure=pareto, settings=settings(widths=(3, 4, 5, 6, 7, 8), steps=150, seed=0),
        expected=(
            Expected(name="right, %", low=90.0),
            Expected(name="integers on the front, %", low=50.0),
            Expected(name="integers on the front, least tables, %", low=50.0),
            Expected(name="4 bits: least changed by minifloats - by integers, points", high=0.0),
            Expected(name="8 bits: least changed by minifloats - by integers, points", high=0.0),
        ),
        notes="a convolutional network of eight kinds of drawn strokes instead of ImageNet's; lookup tables are "
        "counted (studies/claims/multipliers.py), not synthesised, with all levels of a shifter as wide as the "
        "sum, or (least tables) as a product has grown to; one quantisation method of the source's five",
    ),
    Claim(
        name="e3m4_vision", recorded="shown in part", bounds="before", seeds=5, slow=True,
        says="E3M4 suits networks of images better than E4M3",
        source=f"{_SHEN}: E4M3 for language, E3M4 for vision",
        measure=vision, settings=settings(schemes=("e3m4_static", "e4m3_static", "int8_static"), steps=150, seed=0),
        expected=(
            Expected(name="right, %", low=90.0),
            Expected(name="e3m4_static over e4m3_static, dB", low=0.0),
            *(Expected(name=f"{name}_static, dB") for name in ("e3m4", "e4m3", "int8")),
            *(Expected(name=f"{name}_static: changed, %") for name in ("e3m4", "e4m3", "int8")),
        ),
        notes="a convolutional network of eight kinds of drawn strokes, without the source's ImageNet models; the part "
        "about language was not tried",
    ),
)  # fmt: skip
