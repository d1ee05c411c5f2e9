# SPDX-License-Identifier: Apache-2.0
"""The speeds that papers claim for their kernels: named, and not ours to show."""

from fmtsim.lab.reproduce.claim import Claim, Measured, Tell, native


def nothing(tell: Tell) -> Measured:
    """Measure nothing: a simulation says nothing of the speed of native kernels."""
    return Measured(numbers={})


CLAIMS = (
    Claim(
        name="native_speed",
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
        recorded="not ours",
        bounds="source",
    ),
)
