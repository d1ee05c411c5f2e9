# SPDX-License-Identifier: Apache-2.0
"""Calls to ask targets about, and a target that writes down what it is asked."""

import warnings
from dataclasses import dataclass, field

import torch

from fmtsim import GemmPlan, get_format, get_unit
from fmtsim.gemm.targets import target
from fmtsim.gemm.units.unit import is_unit
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.support.errors import PlanUnknownWarning


@dataclass(eq=False)
class Notebook:
    """Resolve every call to the Hopper unit and one plan, and keep the calls."""

    plan: GemmPlan = GemmPlan(source="a test")
    calls: list = field(default_factory=list)
    name: str = "notebook"
    strict: bool | None = None
    basis: str = "rule"

    def resolve(self, call, *, strict=False):
        self.calls.append(call)
        self.strict = strict
        unit = "fp32_fma" if call.a == "fp32" else "hopper.mma" if call.a == "fp64" else "hopper.wgmma"
        path = get_unit(unit).mode(call.a, call.b, call.accumulate)
        a, b = get_format(call.a), get_format(call.b)
        return GemmSpec(
            datapath=path, plan=self.plan, a=a, b=b, unit=unit, accumulate=call.accumulate, basis=self.basis
        )

    def doubt(self, call, plan, strict):
        pass


def hopper(name, kernels, rules):
    """Return a target whose bfloat16 products run on kernels by rules."""
    units = [[["bf16"], "fp32", "hopper.wgmma"]]
    record = {"name": name, "library": "a test", "source": "a test", "units": units, "kernels": kernels, "splits": {}}
    return target.Target.from_dict(record | {"rules": rules})


def install(monkeypatch) -> Notebook:
    """Make every target= of the verbs a fresh notebook."""
    notebook, find_target = Notebook(), target.find_target
    monkeypatch.setattr(target, "get_target", lambda name: notebook)
    monkeypatch.setattr(target, "find_target", lambda name: find_target(name) if is_unit(name) else notebook)
    return notebook


def mm(m, n, k, fmt="bf16", out=torch.float32, **facts):
    return GemmCall(operation="mm", m=m, n=n, k=k, a=fmt, b=fmt, out=out, **facts)


def fp8(m, n, k, fast=True, scaling="tensor", out=torch.float32):
    return GemmCall(
        operation="scaled_mm", m=m, n=n, k=k, a="e4m3", b="e4m3", out=out, fast_accum=fast, scaling=scaling
    )  # fmt: skip


def linear(m, n, k, fmt="bf16", bias=True):
    out = {"bf16": torch.bfloat16, "fp16": torch.float16}[fmt]
    return GemmCall(operation="linear", m=m, n=n, k=k, a=fmt, b=fmt, out=out, bias=bias)


def resolve(call, name="h200", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanUnknownWarning)
        return target.get_target(name).resolve(call, **options)
