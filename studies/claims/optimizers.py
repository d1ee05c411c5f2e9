# SPDX-License-Identifier: Apache-2.0
"""Claims about optimizer states: what they lose, what they take, and whether training notices."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from fmtsim.formats.element import LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.lab.training.corpus import Corpus, load_corpus, sample
from fmtsim.lab.training.decoders import GPT, GPTConfig
from fmtsim.lab.training.learner import BETAS, CLIP, WEIGHT_DECAY, schedule
from fmtsim.optim import SGD, Adam, AdamW, Madam, QuantizedOptimizer, Scheme, StateFormat, get_scheme, memory
from fmtsim.optim import codec as states
from fmtsim.spec.optimizer import STATE_RULES
from studies.claims.claim import Claim, Expected, Measured, Tell, exactly, near, settings
from studies.claims.experiment import generator, last_loss, told

_COAT = "Xi et al., COAT, arXiv:2410.19313, section 4; NVlabs/COAT 80ec99f"
_FP8LM = "Peng et al., FP8-LM, arXiv:2310.18313, section 2.2; Azure/MS-AMP 9746ea8"
_EPS = 1e-8
OPTIMIZERS: dict[str, Callable[..., QuantizedOptimizer]] = {"Madam": Madam, "Adam": Adam, "SGD": SGD}


def moments(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a first moment, lognormal with either sign, and a second one: its square times a squared normal number."""
    source = generator(seed)
    m = torch.randn(count, generator=source).exp() * torch.randn(count, generator=source).sign()
    return m, (m * torch.randn(count, generator=source)).square()


def kept(x: Tensor, fmt: StateFormat) -> tuple[Tensor, states.Parts]:
    """Return numbers after a state has kept them, and its parts."""
    parts = states.encode(x, fmt, {}, None)
    return states.decode(parts, fmt, tuple(x.shape)), parts


def expansion(
    tell: Tell, *, scheme: str, plain: str, steps: int, width: int, batch: int, lr: float, seed: int
) -> Measured:
    """Compare the moments of a training in E4M3 with and without dynamic range expansion: what an update errs."""
    model = _gpt(width, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    _train(model, optimizer, load_corpus(None, 64), seed, steps, batch, lr)
    states_of = [optimizer.state[p] for p in model.parameters() if p.ndim == 2]
    numbers: dict[str, float] = {}
    for label, name in (("expanded", scheme), ("plain", plain)):
        errors, lost, count = 0.0, 0, 0
        for state in states_of:
            m, v = state["exp_avg"], state["exp_avg_sq"]
            first, second = kept(m, get_scheme(name).first)[0], kept(v, get_scheme(name).second)[0]
            error = first / (second.sqrt() + _EPS) - m / (v.sqrt() + _EPS)
            errors += float(error.double().square().sum())
            lost += int(((second == 0) & (v > 0)).sum())
            count += m.numel()
        numbers |= {
            f"mean squared error of m / sqrt(v), {label}": errors / count,
            f"v lost, {label}, %": 100 * lost / count,
        }
    high, low = (numbers[f"mean squared error of m / sqrt(v), {label}"] for label in ("plain", "expanded"))
    return Measured(numbers=numbers | {"plain / expanded": high / low})


def underflow(tell: Tell, *, formats: tuple[str, ...], count: int, seed: int) -> Measured:
    """Count what a second moment with one scale a tensor loses."""
    _, v = moments(count, seed)
    numbers = {}
    for name in formats:
        fmt = StateFormat(format=get_format(name), scaling=STATE_RULES["reciprocal"])  # type: ignore[arg-type]  # element formats
        numbers[f"part of v lost, {name}"] = float((kept(v, fmt)[0] == 0).float().mean())
    return Measured(numbers=numbers)


def bytes_kept(tell: Tell, *, scheme: str, shape: tuple[int, int]) -> Measured:
    """Measure the bytes a parameter of everything that training keeps but activations, gradients in 8 bits."""
    sizes = {}
    for label, name in (("fp8lm", scheme), ("fp32", "fp32")):
        p = nn.Parameter(torch.ones(shape))
        p.grad = torch.ones(shape)
        optimizer = AdamW([p], state=name)
        optimizer.step()
        sizes[label] = memory(optimizer)
    ours = sizes["fp8lm"].per_parameter() + 1
    high = sizes["fp32"].per_parameter("parameters", "gradients", "first", "second")
    return Measured(
        numbers={
            "bytes, first moment": sizes["fp8lm"].per_parameter("first"),
            "bytes, second moment": sizes["fp8lm"].per_parameter("second"),
            "bytes, master weights": sizes["fp8lm"].per_parameter("weights"), "bytes, all with the gradient": ours,
            "bytes, float32": high, "ratio": high / ours,
        },
    )  # fmt: skip


def stall(tell: Tell, *, scheme: str, steps: int, copies: int, seed: int) -> Measured:
    """Let plain gradient descent add 1 to bfloat16 weights of 200, step by step."""
    ends = {}
    nearest = Scheme(name="nearest", weights=StateFormat(format=get_format("bf16")))  # type: ignore[arg-type]
    for label, state in (("to nearest", nearest), ("stochastic", get_scheme(scheme))):
        p = nn.Parameter(torch.full((copies,), 200.0, dtype=torch.bfloat16))
        optimizer = SGD([p], lr=1.0, momentum=0.0, state=state, seed=seed)
        for _ in range(steps):
            p.grad = torch.full_like(p, -1.0)
            optimizer.step()
        ends[f"200 + {steps} x 1, {label}"] = float(p.detach().double().mean())
    return Measured(numbers=ends)


def parity(
    tell: Tell, *, schemes: tuple[str, ...], seeds: tuple[int, ...], steps: int, width: int, batch: int, lr: float
) -> Measured:
    """Train a small GPT under float32 states and others; compare the losses of the last tenth of the steps."""
    losses: dict[str, list[float]] = defaultdict(list)
    corpus = load_corpus(None, 64)
    for name, seed in told(tell, list(product(("fp32", *schemes), seeds))):
        losses[name].append(_trained(corpus, name, seed, steps, width, batch, lr))
    base = losses["fp32"]
    numbers = {"loss, fp32": statistics.mean(base), "spread of the seeds, fp32": max(base) - min(base)}
    for name in schemes:
        gap = statistics.mean(losses[name]) - statistics.mean(base)
        numbers[f"{name} less fp32, spreads"] = gap / (max(base) - min(base))
    return Measured(numbers=numbers)


def _trained(corpus: Corpus, scheme: str, seed: int, steps: int, width: int, batch: int, lr: float) -> float:
    """Return the mean loss of the last tenth of a training, as ``fmtsim train`` runs it."""
    model = _gpt(width, seed)
    optimizer = AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, state=scheme, seed=seed)
    return _train(model, optimizer, corpus, seed, steps, batch, lr)


def _gpt(width: int, seed: int) -> GPT:
    return GPT(GPTConfig(context=64, width=width, layers=2, heads=4), seed)


def _train(
    model: GPT, optimizer: torch.optim.Optimizer, corpus: Corpus, seed: int, steps: int, batch: int, lr: float
) -> float:
    batches = generator(seed + 1)

    def prepare(step: int) -> None:
        optimizer.param_groups[0]["lr"] = lr * schedule(step + 1, steps)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)

    return last_loss(steps, 10, lambda step: model(*sample(corpus.train, batch, 64, batches)), optimizer, prepare)


def logarithmic(
    tell: Tell, *, bits: tuple[int, int], rates: tuple[tuple[str, float], ...], steps: int, seed: int
) -> Measured:
    """Train a small network whose weights are kept as logarithms of many bits and of few, over 16 octaves."""
    numbers = {}
    for name, lr in told(tell, rates):
        ends = []
        for width in bits:
            fmt = LogFormat(name=f"lns{width}", bits=width, gamma=1 << (width - 5))
            state = Scheme(name=fmt.name, weights=StateFormat(format=fmt, scaling=STATE_RULES["fixed"]))
            weights = start(seed)
            optimizer = OPTIMIZERS[name](weights, lr=lr, state=state)
            ends.append(regressed(optimizer, partial(_network, weights), steps, seed))
        numbers[f"{name}, loss at {bits[1]} bits over {bits[0]}"] = ends[1] / ends[0]
    return Measured(numbers=numbers)


def start(seed: int) -> list[nn.Parameter]:
    """Return the weights of three layers, [outputs, inputs] each."""
    source = generator(seed)
    shapes = ((64, 32), (64, 64), (8, 64))
    return [nn.Parameter(torch.randn(shape, generator=source) * 1.4 / shape[1] ** 0.5) for shape in shapes]


def regressed(optimizer: QuantizedOptimizer, network: Callable[[Tensor], Tensor], steps: int, seed: int) -> float:
    """Return the relative squared error behind another network of the same shape, over the last tenth of the steps."""
    source, teacher = generator(seed + 2), start(seed + 1)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(128, 32, generator=source)
        with torch.no_grad():
            y = _network(teacher, x)
        return (network(x) - y).square().mean() / y.square().mean()

    return last_loss(steps, 10, loss_of, optimizer)


def _network(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    for weight in weights[:-1]:
        x = torch.relu(x @ weight.T)
    return x @ weights[-1].T


CLAIMS = (
    Claim(
        name="coat_states", recorded="shown in part", bounds="before", seeds=5,
        says="expanding each group's range lowers the error of an update from E4M3 moments 1.63 times",
        source=_COAT,
        measure=expansion,
        settings=settings(scheme="coat", plain="coat_plain", steps=100, width=64, batch=8, lr=3e-3, seed=0),
        expected=(
            near("plain / expanded", 1.63, 0.05, "paper", part=(1.05, math.inf)),
            Expected(name="mean squared error of m / sqrt(v), plain"),
            Expected(name="mean squared error of m / sqrt(v), expanded"),
            Expected(name="v lost, plain, %"),
            Expected(name="v lost, expanded, %"),
        ),
        notes="moments of matrices after 100 steps of a GPT of 120 thousand parameters; the paper's are of a larger "
        "one, and its figure is unverified",
    ),
    Claim(
        name="moment_underflow", recorded="shown in part", bounds="after",
        says="a second moment with one scale a tensor underflows in E4M3, in E5M2 hardly",
        source="Fishman et al., arXiv:2409.12517, section 5",
        measure=underflow, settings=settings(formats=("e4m3_ieee", "e5m2"), count=1 << 20, seed=0),
        expected=(
            Expected(name="part of v lost, e4m3_ieee", low=0.2),
            Expected(name="part of v lost, e5m2", high=0.01),
        ),
        notes="E4M3 with the top exponent reserved: 17 binades; E5M2 has 31",
    ),
    Claim(
        name="fp8lm_memory", recorded="shown", bounds="source",
        says="an E4M3 and a float16 moment, float16 master weights and 8-bit gradients take 6 bytes instead of 16",
        source=_FP8LM,
        measure=bytes_kept, settings=settings(scheme="fp8lm", shape=(512, 512)),
        expected=(
            near("bytes, first moment", 1.0, 0.05, "paper"),
            near("bytes, second moment", 2.0, 0.05, "paper"),
            near("bytes, master weights", 2.0, 0.05, "paper"),
            near("bytes, all with the gradient", 6.0, 0.05, "paper"),
            near("bytes, float32", 16.0, 0.0, "paper"),
            near("ratio", 2.6, 0.05, "paper"),
        ),
        notes="states are measured; the gradient's byte is the paper's",
    ),
    Claim(
        name="stochastic_weights", recorded="shown", bounds="source",
        says="bfloat16 weights that only grow by small steps stall at 256, with stochastic rounding they do not",
        source="gpu-mode/lectures 7cb40f6, lecture 30; pytorch/ao 36027d8, bf16_stochastic_round",
        measure=stall, settings=settings(scheme="bf16_sr", steps=100, copies=4096, seed=0),
        expected=(
            exactly("200 + 100 x 1, to nearest", 256.0),
            near("200 + 100 x 1, stochastic", 300.0, 0.01, "formula"),
        ),
    ),
    Claim(
        name="madam_logarithms", recorded="shown in part", bounds="after", seeds=5, slow=True,
        says="weights kept as 12-bit logarithms degrade SGD and Adam, multiplicative updates not",
        source="Zhao et al., LNS-Madam, arXiv:2106.13914, section 4.3",
        measure=logarithmic,
        settings=settings(bits=(16, 12), rates=(("Madam", 1 / 64), ("Adam", 1e-3), ("SGD", 1e-2)), steps=300, seed=1),
        expected=(
            Expected(name="Madam, loss at 12 bits over 16", low=0.97, high=1.03),
            Expected(name="Adam, loss at 12 bits over 16", low=1.1),
            Expected(name="SGD, loss at 12 bits over 16", low=1.1),
        ),
        notes="a network of three layers learns another one; the paper trains vision and language models",
    ),
    Claim(
        name="optimizer_parity", recorded="shown in part", bounds="after", slow=True,
        says="8-bit, FP8 and expanded states train like float32 ones; both moments in E4M3 with one scale do not",
        source=f"Dettmers et al., arXiv:2110.02861; {_FP8LM}; {_COAT}; Fishman et al., arXiv:2409.12517",
        measure=parity,
        settings=settings(
            schemes=("bnb8", "fp8lm", "coat", "intel_2t", "fp8lm_v8"), seeds=(0, 1, 2, 3, 4), steps=100, width=64,
            batch=8, lr=3e-3,
        ),
        expected=(
            *(
                Expected(name=f"{name} less fp32, spreads", low=-1.0, high=1.0)
                for name in ("bnb8", "fp8lm", "coat", "intel_2t")
            ),
            Expected(name="fp8lm_v8 less fp32, spreads", low=3.0),
        ),
        notes="100 steps of a GPT of 120 thousand parameters; a spread is that of float32's losses over the seeds",
    ),
)  # fmt: skip
