"""A target that writes down what it is asked, in place of the recorded ones."""

from dataclasses import dataclass, field

from fmtsim import GemmPlan, get_format, get_unit
from fmtsim.gemm.targets import target
from fmtsim.spec.gemm_spec import GemmSpec


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


def install(monkeypatch) -> Notebook:
    """Make every target= of the verbs a fresh notebook."""
    notebook = Notebook()
    monkeypatch.setattr(target, "get_target", lambda name: notebook)
    return notebook
