# SPDX-License-Identifier: Apache-2.0
"""The optimizer that all rules share: checks, the step, and state that is saved and loaded."""

import math
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_flags
from fmtsim.optim import checkpoint, stepping
from fmtsim.optim.catalogue import get_scheme
from fmtsim.optim.rules import Rule, hyperparameters
from fmtsim.spec.optimizer import Numbers, ParameterStep, Scheme, StateFormat, in_parameter
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, FmtsimError, shown

Params = Iterable[Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Below what hyperparameters lie; they begin at 0.
_FIRST = "what a first step makes would be made anew by every replay; do a step before the capture"
_BOUNDS = {"lr": math.inf, "eps": math.inf, "weight_decay": math.inf, "bound": math.inf, "momentum": 1, "beta": 1}


class QuantizedOptimizer(torch.optim.Optimizer):
    """An optimizer whose states are stored in the formats of a scheme; use the subclasses, one a rule.

    Args:
        params: Parameters, or groups of them, as ``torch.optim`` takes them: float32, bfloat16 or float16.
        defaults: Hyperparameters of groups that do not name their own.
        rule: The update rule.
        state: A scheme by name (``fmtsim.optim.list_schemes()``) or as a record.
        seed: Of stochastic rounding. Random words depend on it, on the step, and on the parameter's place alone.

    Raises:
        ArgumentError: A hyperparameter or a name is not allowed.
        DtypeError: A parameter's dtype is not.
    """

    def __init__(self, params: Params, defaults: dict[str, Any], rule: Rule, state: str | Scheme, seed: int) -> None:
        if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
            raise ArgumentError(f"seed={shown(seed)} is not allowed; choose 0 to 2**63 - 1")
        self.scheme, self.rule, self.seed = get_scheme(state), rule, seed
        self._nonfinite: dict[torch.device, Tensor] = {}
        self._formats: dict[Tensor, Mapping[str, StateFormat]] = {}
        self._batches: list[Any] | None = None
        if not isinstance(params, Iterable) or isinstance(params, str | bytes):
            raise ArgumentError(f"params={shown(params)} are not parameters; pass model.parameters()")
        try:
            super().__init__(params, defaults)
        except (TypeError, ValueError) as error:
            if isinstance(error, FmtsimError):
                raise
            raise ArgumentError(f"params are not parameters: {error}; pass model.parameters()") from None

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ArgumentError for hyperparameters that are not allowed: numbers from 0, and decays below 1."""
        check_flags(capturable=group["capturable"])
        for name, end in _BOUNDS.items():
            if name in group:
                one = name == "lr" and isinstance(group[name], Tensor) and group[name].numel() == 1
                _check_number(name, float(group[name]) if one else group[name], end)
        betas = group.get("betas", (0.0, 0.0))
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ArgumentError(f"betas={shown(betas)} is not allowed; choose two numbers in [0, 1)")
        for place, beta in enumerate(betas):
            _check_number(f"betas[{place}]", beta, 1)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own; the scheme and the seed are the optimizer's."""
        if isinstance(param_group, dict) and (reserved := {"state", "seed"} & param_group.keys()):
            raise ArgumentError(
                f"a group of parameters has no {min(reserved)}= of its own; "
                "make a second optimizer for these parameters, and step both"
            )
        try:
            super().add_param_group(param_group)
        except (TypeError, ValueError, LookupError) as error:  # torch's own words for what is not a group of parameters
            raise ArgumentError(f"params are not parameters: {error}; pass model.parameters()") from None
        try:
            self.check_group(self.param_groups[-1])
            for p in self.param_groups[-1]["params"]:
                if p.dtype not in FLOATS:
                    raise DtypeError(f"a parameter of {p.dtype} is not taken; choose float32, bfloat16 or float16")
        except (ArgumentError, DtypeError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Do one step; parameters without gradients are left alone.

        Every gradient is checked before anything changes.

        Returns:
            What ``closure`` returns, if there is one.

        Raises:
            ArgumentError: A gradient is sparse, or a parameter has another shape than its state or gradient.
            DeviceError: A CUDA graph is being captured, and the optimizer is not ``capturable``, no step was done
                before, or no kernel takes a parameter.
        """
        if not all(group["capturable"] for group in self.param_groups):
            stepping.refuse_capture(
                "steps are counted on the host, and every replay would be the same one; make the optimizer with "
                "capturable=True"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._fast_step():
            self._full_step()
        return loss

    def _fast_step(self) -> bool:
        """Do the step in batches of the CUDA engine, which cost the host least; return False if there are none."""
        if self._batches is None or len(self._batches) != len(self.param_groups):
            return False
        present = set(map(id, self.state.values()))
        parts = [batch.launches(present) for batch in self._batches]
        for batch, group, part in zip(self._batches, self.param_groups, parts, strict=True):
            if part is None or len(batch.parameters) != len(group["params"]) or batch.live != group["capturable"]:
                return False
            if not all(map(is_, batch.parameters, group["params"])):
                return False
        for batch, group, part in zip(self._batches, self.param_groups, parts, strict=True):
            like, step = batch.parameters[0], 0 if batch.live else batch.states[0]["step"] + 1
            scalars = hyperparameters(group, like.device) if batch.live else self._numbers(group, step)
            batch.step(part, scalars, self._count(like.device), self.seed, step)
        return True

    def _full_step(self) -> None:
        steps = self._steps()
        fused = stepping.run_steps(steps, self.rule, self.scheme, self._count)
        self._batches = stepping.batches_of(steps, self.param_groups, self.rule, self.scheme) if fused else None

    def nonfinite_gradients(self) -> int:
        """Return how many elements of gradients were NaN or infinite in all steps so far; waits for the device.

        What they did to the state is the scheme's own rule, ``optimizer.scheme.nonfinite``.
        """
        return sum(int(count) for count in self._nonfinite.values())

    def refresh_weights(self) -> None:
        """Encode the stored weights anew from the parameters, after these were changed by hand."""
        for index, (_, p) in enumerate(self._parameters()):
            fmt = self._formats_of(p).get("weights")
            if p in self.state and fmt is not None and not in_parameter(fmt, p.dtype):
                fresh = stepping.start(stepping.local(p), {"weights": fmt}, self.rule, self.seed, index)
                self.state[p].update({name: fresh[name] for name in fresh if name.startswith("weights")})

    def state_dict(self) -> dict[str, Any]:
        """Return the state as ``torch.optim`` does, with the scheme's and the rule's name under ``"fmtsim"``."""
        return super().state_dict() | {"fmtsim": checkpoint.header(self.rule, self.scheme, self.seed)}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, convert: bool = False) -> None:  # type: ignore[override]
        """Load what ``state_dict`` returned; training goes on as if it had not been interrupted, bit for bit.

        Everything is checked first: after an error the optimizer is as it was.

        Args:
            state_dict: Of this rule and scheme. It is not changed, and shares no memory afterwards.
            convert: Take the state of another scheme, or of ``torch.optim``, decode it and encode it anew.

        Raises:
            ArgumentError: The state is another scheme's (without ``convert``) or another rule's, or does not fit the
                parameters.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, dict(state_dict))
            state_dict = state_dict if changed is None else changed
        groups = checkpoint.groups(state_dict, self.param_groups)
        for group in groups:
            self.check_group(group)
        parameters = [p for _, p in self._parameters()]
        shards, formats = [stepping.local(p) for p in parameters], [self._formats_of(p) for p in parameters]
        states = checkpoint.states(state_dict, shards, formats, self.rule, self.scheme, convert)
        self.__dict__["param_groups"] = groups
        self._batches = None
        self.state.clear()
        self.state.update((p, state) for p, state in zip(parameters, states, strict=True) if state)
        for group, p in self._parameters():
            self._count_there(group, p)
        self.seed = state_dict.get("fmtsim", {}).get("seed", self.seed)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: getattr(self, name) for name in ("scheme", "rule", "seed", "_nonfinite")}
        return super().__getstate__() | attributes | {"_formats": {}, "_batches": None}  # type: ignore[no-untyped-call]  # torch's own

    def _parameters(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, p) for group in self.param_groups for p in group["params"]]

    def _formats_of(self, p: Tensor) -> Mapping[str, StateFormat]:
        if p not in self._formats:
            self._formats[p] = self.scheme.formats(tuple(stepping.local(p).shape), self.rule.slots)
        return self._formats[p]

    def _count(self, device: torch.device) -> Tensor:
        """Return the counter of a device: int64, 0-d."""
        if device not in self._nonfinite:
            stepping.refuse_capture(_FIRST)
            self._nonfinite[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._nonfinite[device]

    def _steps(self) -> list[ParameterStep]:
        """Return the step of each parameter that has a gradient; raise before anything is changed."""
        every = enumerate(self._parameters())
        stepped = [(i, group, p) for i, (group, p) in every if p.grad is not None and stepping.local(p).numel()]
        for index, _, p in stepped:
            self._check(index, p)
        numbers: dict[tuple[int, int], Any] = {}
        steps = []
        for index, group, p in stepped:
            assert p.grad is not None
            state, here, formats = self.state[p], stepping.local(p), self._formats_of(p)
            if not state:
                stepping.refuse_capture(_FIRST)
                state.update(stepping.start(here, formats, self.rule, self.seed, index))
            self._count_there(group, p)
            gradient, live = stepping.local(p.grad).resolve_neg(), group["capturable"] and stepping.on_cuda(here)
            step = 0 if live else int(state["step"]) + 1
            key = (id(group), step)
            if key not in numbers:
                numbers[key] = hyperparameters(group, here.device) if live else self._numbers(group, step)
            scalars = (Numbers(), numbers[key]) if live else (numbers[key], None)
            steps.append(
                ParameterStep(here, gradient, state, step, formats, scalars[0], self.seed, index, live=scalars[1])
            )
        return steps

    def _numbers(self, group: Mapping[str, Any], step: int) -> Numbers:
        """Return the scalars of a step that the host counts."""
        return self.rule.numbers({**group, "lr": float(group["lr"])}, step, self.scheme)

    def _count_there(self, group: Mapping[str, Any], p: Tensor) -> None:
        """Keep the count of a parameter's steps where its group says: in a tensor beside it, or on the host."""
        count = self.state[p].get("step") if p in self.state else None
        if group["capturable"] and isinstance(count, int):
            self.state[p]["step"] = torch.tensor(count, dtype=torch.int64, device=stepping.local(p).device)
        elif not group["capturable"] and isinstance(count, Tensor):
            self.state[p]["step"] = int(count)

    def _check(self, index: int, p: Tensor) -> None:
        g = p.grad
        assert g is not None
        if g.is_sparse or g.layout != torch.strided:
            raise ArgumentError(
                f"the gradient of parameter {index} is sparse ({g.layout}); use dense gradients (sparse=False of an "
                "embedding), or torch.optim.SparseAdam for it"
            )
        state, here = self.state.get(p) or {}, stepping.local(p)
        if not torch.compiler.is_compiling() and not all(
            x.is_meta or is_readable(x) for x in (here, stepping.local(g))
        ):
            raise ArgumentError(f"parameter {index} or its gradient is fake, or traced by vmap; step with real tensors")
        shape = state.get("shape", here.shape)
        if tuple(shape) != tuple(here.shape):
            raise ArgumentError(
                f"parameter {index} is {list(here.shape)} now, its state is of {list(shape)}; make a new optimizer"
            )
        places = {x.device for x in state.values() if isinstance(x, Tensor)} - {here.device}
        if places:
            raise ArgumentError(
                f"parameter {index} is on {here.device} now, its state on {', '.join(map(str, places))}; "
                "optimizer.load_state_dict(optimizer.state_dict()) moves it"
            )
        if stepping.local(g).shape != here.shape:
            raise ArgumentError(
                f"the gradient of parameter {index} is {list(g.shape)}, the parameter {list(p.shape)}; set it anew"
            )
        weight_format = self._formats_of(p).get("weights")
        if (
            state
            and weight_format is not None
            and "weights" not in state
            and not in_parameter(weight_format, here.dtype)
        ):
            raise ArgumentError(
                f"parameter {index} is {here.dtype} now, and no longer holds its weights as {self.scheme.name!r} keeps "
                "them; make a new optimizer"
            )


def _check_number(name: str, value: Any, end: float) -> None:
    """Refuse what is not a number from 0 to below an end."""
    if not isinstance(value, int | float) or not 0 <= value < min(end, 1 << 1023):
        allowed = "of 0 or more" if end == math.inf else f"in [0, {end})"
        raise ArgumentError(f"{name}={shown(value)} is not allowed; choose a number {allowed}")
