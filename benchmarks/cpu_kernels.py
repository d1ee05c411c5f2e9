# SPDX-License-Identifier: Apache-2.0
"""Time CPU kernels beside the torch operations that would serve in their place, on one thread: the same bits.

python benchmarks/cpu_kernels.py [--count 4194304] [--repeat 5] [--casts logfmt8 ...] [--steps bnb8 Madam:lns_madam ...]
"""

import argparse
import time
from collections.abc import Callable

import torch

import fmtsim
from fmtsim import cpu, torch_engine

CASTS = ("logfmt8", "logfmt10")
STEPS = ("fp32", "bnb8", "ao_8bit", "int8_weights", "Madam:lns_madam", "coat_fixed")


def milliseconds(run: Callable[[], object], repeat: int) -> float:
    """Return the least CPU time of a call after a first one."""
    run()
    times = []
    for _ in range(repeat):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def optimizer(name: str, count: int) -> torch.optim.Optimizer:
    """Return AdamW of torch, or a rule with states in a scheme's formats, for one matrix with a gradient."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(count // 1024, 1024, generator=generator) * 0.02)
    p.grad = torch.randn(p.shape, generator=generator) * 1e-3
    if name in ("foreach", "fused"):
        return torch.optim.AdamW([p], lr=1 / 1024, **{name: True})
    rule, _, scheme = name.rpartition(":")
    made: torch.optim.Optimizer = getattr(fmtsim.optim, rule or "AdamW")([p], lr=1 / 1024, state=scheme)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1 << 22, help="elements or parameters, a multiple of 1024")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--casts", nargs="*", default=CASTS, metavar="FORMAT")
    parser.add_argument("--steps", nargs="*", default=STEPS, metavar="[RULE:]SCHEME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cpu.set_num_threads(1)
    print(f"{options.count} elements, one thread, ms")
    for name in ("foreach", "fused") if options.steps else ():
        step = optimizer(name, options.count).step
        print(f"{'torch ' + name:24s} {milliseconds(step, options.repeat):10.1f}")
    runs: dict[str, Callable[[], object]] = {
        f"step {name}": optimizer(name, options.count).step for name in options.steps
    }
    x = torch.randn(options.count // 1024, 1024, generator=torch.Generator().manual_seed(0))
    for name in options.casts:
        runs[f"quantize {name}"] = lambda name=name: fmtsim.quantize(x, name)
        runs[f"decode {name}"] = fmtsim.encode(x, name).decode
    kernels = {name: milliseconds(run, options.repeat) for name, run in runs.items()}
    print(f"{'':24s} {'kernels':>10s} {'torch':>10s} {'ratio':>8s}")
    # kernels of optimizers are replaced first: a step under torch operations still calls kernels of casts
    cpu.supports_optimizer = lambda rule, scheme: False
    cpu.optimizer_steps = lambda rule, steps, scheme, counter: steps
    for name, run in runs.items():
        if not name.startswith("step "):
            for verb in ("quantize", "encode", "decode"):
                setattr(cpu, verb, getattr(torch_engine, verb))
        torch_ms = milliseconds(run, options.repeat)
        print(f"{name:24s} {kernels[name]:10.1f} {torch_ms:10.1f} {torch_ms / kernels[name]:8.2f}")


if __name__ == "__main__":
    main()
