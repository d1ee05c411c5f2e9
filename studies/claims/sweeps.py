# SPDX-License-Identifier: Apache-2.0
"""Claims about trainings over seeds, rates and sizes: tasks in FP8, scaling laws; and speeds of kernels."""

import math
from dataclasses import replace
from functools import lru_cache

from fmtsim.lab.training.corpus import Corpus, load_corpus, task_corpus
from fmtsim.lab.training.sweep import Point, SweepConfig, SweepRun, points_of, train_point
from fmtsim.lab.training.sweep_result import Choice, SweepResult, Trained, byte_entropy, fit_law
from studies.claims.claim import Claim, Expected, Measured, Tell, native, near, settings
from studies.claims.experiment import trainings


def nothing(tell: Tell) -> Measured:
    """Measure nothing: a simulation says nothing of the speed of native kernels."""
    return Measured(numbers={})


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="native_speed", recorded="not ours", bounds="source",
        says="low precision is faster where the hardware has it",
        source="FP8-LM, arXiv:2310.18313; Fishman et al., arXiv:2409.12517; FlashAttention-3, arXiv:2407.08608; COAT, "
        "arXiv:2410.19313; HALO, arXiv:2501.02625; muS, arXiv:2502.05967; Quartet II, arXiv:2601.22813",
        measure=nothing,
        expected=(
            native("FP8-LM over BF16, faster by %", 64.0),
            native("FP8-LM over Transformer Engine, faster by %", 17.0),
            native("Intel's FP8 over BF16 on Gaudi 2, more throughput by %", 34.0),
            native("FlashAttention-3 in FP8, PFLOP/s", 1.2),
            native("COAT over BF16, times as fast", 1.43),
            native("HALO on an RTX 4090, times as fast", 1.31),
            native("muS over BF16, faster by up to %", 33.0),
            native("Quartet II over BF16, times as fast, up to", 4.2),
        ),
    ),
)  # fmt: skip


def swept(
    tell: Tell, config: SweepConfig, schemes: tuple[str, ...], rates: tuple[float, ...], width: int, steps: int,
    seeds: tuple[int, ...], *, asks: bool = False,
) -> SweepResult:  # fmt: skip
    """Train every combination, on questions if ``asks``, and return what ``fmtsim sweep`` makes of the runs."""
    points = points_of(schemes, rates, (width,), (steps,), seeds)
    runs = trainings(tell, run_of, [{"config": config, "point": point, "asks": asks} for point in points])
    return SweepResult(runs=tuple(runs), entropy=byte_entropy(_corpus(asks, config.context).train))


def run_of(config: SweepConfig, point: Point, *, asks: bool, device: str = "cpu") -> SweepRun:
    """Train one model on a device."""
    return train_point(replace(config, device=device), point, _corpus(asks, config.context))


@lru_cache(maxsize=2)
def _corpus(asks: bool, context: int) -> Corpus:
    return task_corpus() if asks else load_corpus(None, context)


def tasks(
    tell: Tell, *, schemes: tuple[str, str], lr: float, width: int, steps: int, batch: int, seeds: tuple[int, ...],
    **sizes: int,
) -> Measured:  # fmt: skip
    """Train on sums, copies and brackets, and count loss spikes and right answers to held-out questions."""
    result = swept(tell, SweepConfig(batch_size=batch, **sizes), schemes, (lr,), width, steps, seeds, asks=True)  # type: ignore[arg-type]
    numbers: dict[str, float] = {}
    for group in result.groups():
        name = group["scheme"]
        counts = [count for run in result.runs if run.point.scheme == name for count in run.tasks.values()]
        right, asked = (sum(column) for column in zip(*counts, strict=True))
        numbers |= {f"{name}, right answers, %": 100 * right / asked, f"{name}, spikes": float(group["spikes"])}
        numbers[f"{name}, held-out loss"] = group["validation"]
    first, second = schemes
    numbers["spikes more in FP8"] = numbers[f"{second}, spikes"] - numbers[f"{first}, spikes"]
    answers = (numbers[f"{name}, right answers, %"] for name in schemes)
    numbers["right answers less in FP8, points"] = next(answers) - next(answers)
    return Measured(numbers=numbers)


def fewer_bits(
    tell: Tell, *, schemes: tuple[str, ...], rates: tuple[float, ...], width: int, steps: int, seeds: tuple[int, ...],
    **sizes: int,
) -> Measured:  # fmt: skip
    """Count failed runs by the bits of operands, and say how well sharpness foretells them."""
    config = SweepConfig(clip=None, final_rate=1.0, **sizes)  # type: ignore[arg-type]
    result = swept(tell, config, schemes, rates, width, steps, seeds)
    failed = {group["scheme"]: 100 * group["failed"] / group["runs"] for group in result.groups()}
    first = schemes[0]
    numbers = {f"{name}, failed runs in %": part for name, part in failed.items()}
    numbers |= {f"{name} less {first}, failed runs, points": failed[name] - failed[first] for name in schemes[1:]}
    areas = {predictor.name: predictor.area for predictor in result.predictors()}
    numbers |= {f"area of {name}": area for name, area in areas.items()}
    numbers["area of sharpness less the rate's"] = areas["sharpness"] - areas["learning rate"]
    return Measured(numbers=numbers)


CLAIMS += (
    Claim(
        name="fp8_tasks", recorded="not shown", bounds="before", slow=True,
        says="FP8 trainings have more loss spikes than bfloat16's, and answer fewer questions of mathematics and code",
        source="arXiv:2411.08719, abstract",
        measure=tasks,
        settings=settings(
            schemes=("bf16", "te_delayed"), lr=8e-3, width=32, steps=300, batch=16, seeds=(0, 1, 2, 3, 4),
        ),
        recorded_on_card="not shown",
        card=settings(lr=2e-3, width=256, layers=6, heads=8, context=128, steps=2000, batch=64),
        expected=(
            Expected(name="bf16, right answers, %", low=10.0),
            Expected(name="right answers less in FP8, points", low=2.0),
            Expected(name="spikes more in FP8", low=1.0),
            Expected(name="te_delayed, right answers, %"),
            Expected(name="bf16, held-out loss"),
            Expected(name="te_delayed, held-out loss"),
        ),
        notes="a GPT of two blocks learns sums, copies and brackets for 300 steps, too few to answer in any precision; "
        "the source goes on training 70 billion parameters",
    ),
    Claim(
        name="fewer_bits", recorded="not shown", bounds="before", slow=True,
        says="trainings with fewer mantissa or exponent bits fail more often, and sharpness foretells which",
        source="Lee et al., To FP8 and Back Again, arXiv:2405.18710 (abstract and secondary sources)",
        measure=fewer_bits,
        settings=settings(
            schemes=("bf16", "e8m3", "e5m7"), rates=(8e-3, 1.6e-2), width=32, steps=150, seeds=(0, 1, 2, 3, 4),
        ),
        recorded_on_card="not shown",
        card=settings(rates=(4e-3, 8e-3), width=256, layers=6, heads=8, context=128, batch_size=32, steps=800),
        expected=(
            *(Expected(name=f"{name}, failed runs in %") for name in ("bf16", "e8m3", "e5m7")),
            Expected(name="e8m3 less bf16, failed runs, points", low=40.0),
            Expected(name="e5m7 less bf16, failed runs, points", low=40.0),
            Expected(name="area of sharpness", low=0.7),
            Expected(name="area of sharpness less the rate's", low=0.0),
            Expected(name="area of training loss"),
        ),
        notes="10 runs a format of a GPT of two blocks, 150 steps without clipping; 40 points are two standard errors "
        "of a difference. The areas are under ROC curves, of what is known after 30 % of the steps",
    ),
)  # fmt: skip


# Held-out losses on C4 by forward and backward precision, parameters, and steps, from the notebook named below. "sr" is
# MXFP4 rounded stochastically, "quest" MXFP4 by QuEST.
_SIZES = {"30M": 30482560, "50M": 49556736, "100M": 102777856, "200M": 203188480, "430M": 443068288, "800M": 822151168}
_STEPS = {
    "30M": (2861, 5722, 11444, 22888, 45776, 91552, 183105), "50M": (4768, 9536, 19073, 38146, 76293, 152587),
    "100M": (9536, 19073, 38146, 76293, 152587, 305175), "200M": (19073, 38146, 76293), "430M": (164031,),
    "800M": (305175,),
}  # fmt: skip
_LOSSES = {
    ("bf16", "bf16"): {
        "30M": (3.41571, 3.29368, 3.20785, 3.1470, 3.09895, 3.0609, 3.03114),
        "50M": (3.24001, 3.14171, 3.0677, 3.01214, 2.97009, 2.93528),
        "100M": (3.05118, 2.95905, 2.88578, 2.83359, 2.79347, 2.76273),
        "200M": (2.88419, 2.79835, 2.73594), "430M": (2.57078,), "800M": (2.46098,),
    },
    ("bf16", "sr"): {
        "30M": (3.4302, 3.30879, 3.22104, 3.15739, 3.11049, 3.0711, 3.04006),
        "50M": (3.25517, 3.15509, 3.08219, 3.0244, 2.98139, 2.94425),
        "100M": (3.06675, 2.97427, 2.90044, 2.84596, 2.80412, 2.7713), "200M": (2.89457, 2.80889, 2.74316),
    },
    ("quest", "bf16"): {
        "30M": (3.48209, 3.36955, 3.28726, 3.23693, 3.19918, 3.16289),
        "50M": (3.30821, 3.21191, 3.14552, 3.09955, 3.06232, 3.02732),
        "100M": (3.11734, 3.0291, 2.9613, 2.9145, 2.87995, 2.84843), "200M": (2.94854, 2.86402, 2.80348),
    },
}  # fmt: skip


def published_runs(tokens_a_step: int) -> list[Trained]:
    """Return the losses as runs."""
    return [
        Trained(_SIZES[size], steps * tokens_a_step, loss, forward, backward)
        for (forward, backward), sizes in _LOSSES.items()
        for size, losses in sizes.items()
        for steps, loss in zip(_STEPS[size], losses, strict=False)
    ]


def law(tell: Tell, *, base: str, tokens_a_step: int, parameters: float, ratios: tuple[float, ...]) -> Measured:
    """Fit Quartet's law to the losses of its authors, and find the tokens a parameter from which FP4 is best."""
    fitted = fit_law(published_runs(tokens_a_step), base)
    a, alpha, b, beta, e, gamma = fitted.constants
    choices = [
        Choice(first, second, 1.0 if first == base else 4.0, 1.0 if second == base else 4.0)
        for first in fitted.eff_n for second in fitted.eff_d
    ]  # fmt: skip
    best = [fitted.best(parameters, parameters * ratio, choices) for ratio in ratios]
    from_ratio = next((r for r, one in zip(ratios, best, strict=True) if base not in one[:2]), math.inf)
    tell(1.0)
    return Measured(
        numbers={
            "A": a, "alpha": alpha, "B": b, "beta": beta, "E": e, "gamma": gamma,
            "parameters worth, QuEST forward": fitted.eff_n["quest"],
            "tokens worth, stochastic backward": fitted.eff_d["sr"],
            "tokens a parameter from which FP4 is best": from_ratio,
        }
    )  # fmt: skip


CLAIMS += (
    Claim(
        name="scaling_law", recorded="shown", bounds="after",
        says="FP4 forward is worth 0.65 of the parameters and FP4 backward 0.89 of the tokens, so that FP4 can be best",
        source="Castro et al., Quartet, arXiv:2505.14669, section 4; IST-DASLab/Quartet 5b9d74c, notebooks/plots.ipynb",
        measure=law,
        settings=settings(
            base="bf16", tokens_a_step=512 * 512, parameters=1e9, ratios=tuple(2.0**i for i in range(1, 15)),
        ),
        expected=(
            near("A", 127444.685, 0.01, "code"),
            near("alpha", 0.57852, 0.001, "code"),
            near("B", 465834.312, 0.01, "code"),
            near("beta", 0.538877, 0.001, "code"),
            near("E", 1.340846, 0.001, "code"),
            near("gamma", 0.276416, 0.001, "code"),
            near("parameters worth, QuEST forward", 0.645163, 0.001, "code"),
            near("tokens worth, stochastic backward", 0.893469, 0.001, "code"),
            Expected(name="tokens a parameter from which FP4 is best"),
        ),
        notes="the runs are the authors', the fit is ours; FP4 products count as four times as fast as bfloat16's",
    ),
)  # fmt: skip
