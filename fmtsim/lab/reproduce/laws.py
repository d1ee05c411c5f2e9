# SPDX-License-Identifier: Apache-2.0
"""Claims about laws of training: what a precision costs in parameters and tokens, fitted to losses of its authors."""

import math

from fmtsim.lab.reproduce.claim import Claim, Expected, Measured, Tell, near, settings
from fmtsim.lab.training.scaling_law import Choice, Trained, fit_law

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
    found = fit_law(published_runs(tokens_a_step), base)
    a, alpha, b, beta, e, gamma = found.constants
    choices = [
        Choice(first, second, 1.0 if first == base else 4.0, 1.0 if second == base else 4.0)
        for first in found.eff_n for second in found.eff_d
    ]  # fmt: skip
    best = [found.best(parameters, parameters * ratio, choices) for ratio in ratios]
    from_ratio = next((r for r, one in zip(ratios, best, strict=True) if base not in one[:2]), math.inf)
    tell(1.0)
    return Measured(
        numbers={
            "A": a, "alpha": alpha, "B": b, "beta": beta, "E": e, "gamma": gamma,
            "parameters worth, QuEST forward": found.eff_n["quest"],
            "tokens worth, stochastic backward": found.eff_d["sr"],
            "tokens a parameter from which FP4 is best": from_ratio,
        }
    )  # fmt: skip


CLAIMS = (
    Claim(
        name="scaling_law",
        says="FP4 forward is worth 0.65 of the parameters and FP4 backward 0.89 of the tokens, so that FP4 can be best",
        source="Castro et al., Quartet, arXiv:2505.14669, section 4; IST-DASLab/Quartet 5b9d74c, notebooks/plots.ipynb",
        measure=law,
        settings=settings(
            base="bf16", tokens_a_step=512 * 512, parameters=1e9, ratios=tuple(2.0**i for i in range(1, 15))
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
        recorded="shown",
        bounds="after",
        notes="the runs are the authors', the fit is ours; FP4 products count as four times as fast as bfloat16's",
    ),
)
