"""A GPU's own matrix unit against its emulation: both run, their bits are compared."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmtsim.analysis.compare import compare
from fmtsim.analysis.comparison import Comparison


def compare_native(
    verb: Callable[..., Tensor], *arguments: Any, emulate_on: torch.device | str | None = None, **options: Any
) -> Comparison:
    """Run a product natively and emulated, and compare the bits.

    Args:
        verb: ``fmtsim.mm``, ``bmm``, ``linear``, ``scaled_mm`` or ``int_mm``.
        arguments: Its tensors, on the GPU that the target describes.
        emulate_on: Device of the emulation, such as ``"cpu"``; None emulates on the GPU.
        options: Its keywords, ``target=`` among them; not ``native``.

    Returns:
        ``fmtsim.compare(native, emulated)``.

    Raises:
        ArgumentError: The tensors are not on the target's GPU, or torch does not have the call; it says why.

    >>> import torch, fmtsim
    >>> a = torch.ones(16, 16, dtype=torch.bfloat16)
    >>> compare_native(fmtsim.mm, a, a, target="h200")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fmtsim.errors.ArgumentError: native=True is not possible: the tensors are on cpu, not on a CUDA GPU; ...
    """
    native = verb(*arguments, native=True, **options)
    if emulate_on is not None:
        arguments = tuple(_moved(x, emulate_on) for x in arguments)
        options = {name: _moved(x, emulate_on) for name, x in options.items()}
    return compare(native, verb(*arguments, native=False, **options))


def _moved(x: Any, device: torch.device | str) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    return type(x)(_moved(member, device) for member in x) if type(x) in (list, tuple) else x
