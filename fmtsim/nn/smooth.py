"""Smooth-SwiGLU: the gated product divided by a scale of its own before it is quantised, and multiplied afterwards.

Source: Fishman et al., Scaling FP8 training to trillion-token LLMs, arXiv:2409.12517, and its code (Megatron-DeepSpeed
20029cf, class ScaledSwiglu). The paper's scale is one a channel, the code's one a token.
"""

from functools import lru_cache
from typing import Any, Final, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.errors import ArgumentError
from fmtsim.nn.modules import EmulatedModule
from fmtsim.scaling.scales import power_of_two as to_power_of_two

Per = Literal["token", "channel"]
Model = TypeVar("Model", bound=nn.Module)

_PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")
_RULE: Final = "_fmtsim_smooth"  # on each converted module: per, power_of_two


def smooth_scale(v: Tensor, per: Per = "token", *, power_of_two: bool = False) -> Tensor:
    """Return the largest magnitude of every token, or of every channel, of the linear half of a gated product.

    Args:
        v: ``[..., channels]``, floating point.
        per: ``"token"`` gives ``[..., 1]``, the code's rule; ``"channel"`` gives ``[channels]``, the paper's.
        power_of_two: Round the scale up to a power of two, so that dividing by it is exact.

    Returns:
        Scales of v's dtype (of float32 where powers of two are asked for), without gradient. A token or channel of
        zeros has scale 1; the source's code divides by zero there. NaN gives NaN.

    Raises:
        ArgumentError: An unknown rule.
    """
    if per not in get_args(Per):
        raise ArgumentError(f"per={per!r} is unknown; choose 'token' or 'channel'")
    size = v.detach().abs()
    amax = size.amax(-1, keepdim=True) if per == "token" else size.reshape(-1, v.shape[-1]).amax(0)
    amax = torch.where(amax == 0, torch.ones_like(amax), amax)
    if not power_of_two:
        return amax
    return torch.where(amax.isfinite(), to_power_of_two(amax.float().nan_to_num(), up=True), amax.float())


def smooth_swiglu(
    u: Tensor, v: Tensor, *, per: Per = "token", power_of_two: bool = False, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``z = silu(u) * (v / s)`` and s: z is what is quantised, ``z s`` the gated product.

    Args:
        u: ``[..., channels]``, the half behind SiLU.
        v: The other half, of the same shape.
        per: See ``smooth_scale``.
        power_of_two: See there.
        scale: Use these scales instead of v's own (delayed scaling).

    s is a constant for the gradient (the source's ``detach``). NaN and infinities pass as in the plain product.

    >>> z, s = smooth_swiglu(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -6.0]]))
    >>> s, bool(((z * s) == torch.nn.functional.silu(torch.tensor([1.0, 2.0])) * torch.tensor([3.0, -6.0])).all())
    (tensor([[6.]]), True)
    """
    if u.shape != v.shape:
        raise ArgumentError(f"u has shape {tuple(u.shape)} and v {tuple(v.shape)}; pass two halves of one shape")
    s = smooth_scale(v, per, power_of_two=power_of_two) if scale is None else scale.detach()
    return F.silu(u) * (v / s), s


class SmoothSwiGLU(nn.Module):
    """Apply a gated feed-forward layer, ``down(silu(gate(x)) * up(x))``, whose product is smoothed for quantisation.

    The function is that of the plain layer: a scale a token multiplies the result of the down projection, a scale a
    channel multiplies the columns of its weight. After ``fmtsim.convert`` its three products are emulated.

    Args:
        width: Features of input and output.
        hidden: Channels of the gated product.
        bias: Whether the projections have biases.
        per: See ``smooth_scale``.
        power_of_two: See there.
        delayed: Use the scale of the previous call, as the source's code can; the first call uses its own. Per channel
            alone, because tokens change from call to call.

    Raises:
        ArgumentError: ``delayed`` with a scale a token.
    """

    previous: Tensor

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        bias: bool = False,
        per: Per = "token",
        power_of_two: bool = False,
        delayed: bool = False,
    ) -> None:
        super().__init__()
        if delayed and per == "token":
            raise ArgumentError("delayed=True with per='token' has no scale to keep; pass per='channel'")
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)
        self.per, self.power_of_two, self.delayed = per, power_of_two, delayed
        self.register_buffer("previous", torch.zeros(hidden), persistent=False)  # zeros: no call yet

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to itself."""
        u, v = self.gate_proj(x), self.up_proj(x)
        s = smooth_scale(v, self.per, power_of_two=self.power_of_two)
        if self.delayed:
            s, now = torch.where(self.previous > 0, self.previous, s.float()).to(s.dtype), s
            self.previous.copy_(now)
        z, s = smooth_swiglu(u, v, scale=s)
        return scaled_down(self.down_proj, z, s, self.per)

    def extra_repr(self) -> str:
        """Show the rule."""
        return f"per={self.per!r}, power_of_two={self.power_of_two}, delayed={self.delayed}"


def scaled_down(down: nn.Linear, z: Tensor, s: Tensor, per: Per) -> Tensor:
    """Return ``(z s) w^T + bias`` of a linear layer, plain or converted, z being quantised without s."""
    weight = down.weight if per == "token" else down.weight * s.to(down.weight.dtype)
    y = down.gemm(z, weight, None) if isinstance(down, EmulatedModule) else F.linear(z, weight)
    y = y * s.to(y.dtype) if per == "token" else y
    return y if down.bias is None else y + down.bias.to(y.dtype)


def convert_swiglu(model: Model, *, per: Per = "token", power_of_two: bool = False) -> Model:
    """Smooth the gated layers of a model, in place: same objects, Parameters and state_dict, another forward.

    A gated layer has linear ``gate_proj``, ``up_proj`` and ``down_proj`` and SiLU as ``act_fn``, as in Hugging Face's
    Llama. It goes with ``fmtsim.convert``, in any order.

    Args:
        model: Any module.
        per: See ``smooth_scale``.
        power_of_two: See there.

    Raises:
        ArgumentError: There is no such layer, or an unknown rule. The model is then unchanged.
    """
    smooth_scale(torch.zeros(1, 1), per)  # refuses an unknown rule
    found = [module for module in model.modules() if _is_gated(module)]
    if not found:
        raise ArgumentError(
            f"convert_swiglu found no gated layer in {type(model).__name__}; "
            f"it looks for linear {', '.join(_PROJECTIONS)} and act_fn=SiLU, or build the model with SmoothSwiGLU"
        )
    for module in found:
        module.__dict__[_RULE] = (per, power_of_two)
        module.__class__ = _smoothed(type(module))  # type: ignore[assignment, arg-type]
    return model


def revert_swiglu(model: Model) -> Model:
    """Give gated layers their own forward back, in place; raise ArgumentError where none is converted."""
    found = [module for module in model.modules() if _RULE in module.__dict__]
    if not found:
        raise ArgumentError(f"{type(model).__name__} has no converted gated layer; call convert_swiglu first")
    for module in found:
        del module.__dict__[_RULE]
        module.__class__ = type(module).__mro__[1]  # type: ignore[assignment]
    return model


@lru_cache(maxsize=64)
def _smoothed(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Smooth{cls.__name__}", (cls,), {"forward": _smooth_forward, "__doc__": cls.__doc__})


def _smooth_forward(self: Any, x: Tensor) -> Tensor:
    per, power_of_two = self.__dict__[_RULE]
    z, s = smooth_swiglu(self.gate_proj(x), self.up_proj(x), per=per, power_of_two=power_of_two)
    return scaled_down(self.down_proj, z, s, per)


def _is_gated(module: nn.Module) -> bool:
    linear = all(isinstance(getattr(module, name, None), nn.Linear) for name in _PROJECTIONS)
    return (
        linear
        and _RULE not in module.__dict__
        and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    )
