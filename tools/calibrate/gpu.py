# SPDX-License-Identifier: Apache-2.0
"""A GPU that is asked: full-size library calls, of which a few rows and columns are chosen and looked at."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from fmtsim.casts.ops import load_engine
from fmtsim.lab.explain.samples import Extras
from fmtsim.spec.call import GemmCall
from fmtsim.support.errors import DeviceError, first_line

NO_EXTRAS = Extras()


class GPU(Protocol):
    """Something that multiplies: a GPU with its library, or a model of one."""

    name: str
    library: str
    device: torch.device

    def ask(self, call: GemmCall, a: Tensor, b: Tensor, extras: Extras = NO_EXTRAS) -> Tensor:
        """Return some results of a call of full size.

        Args:
                a: [R, K], R of the call's M rows, stored as the call's format is; where they lie is the GPU's choice.
            b: [C, K], C of its N columns.
            extras: Bias and scales of those rows and columns.

        Returns:
            [R, C] on the CPU, in the call's output dtype.
        """
        ...

    def differing(self, call: GemmCall, a: Tensor, b: Tensor, extras: Extras = NO_EXTRAS) -> int:
        """Return how many results of a call differ from the first where all rows are equal, and all columns.

        Args:
            call: The call.
            a: [1, K], every row of the first operand.
            b: [1, K], every column of the second.
            extras: One bias, and one scale of each operand, for all.
        """
        ...


class TorchGPU:
    """Ask an NVIDIA GPU through torch's own functions.

    The other rows of an operand hold leftovers, which no chosen result depends on.
    """

    def __init__(self, device: torch.device) -> None:
        facts = torch.cuda.get_device_properties(device)
        self.device = device
        self.name = facts.name
        self.library = (
            f"{facts.name} ({facts.multi_processor_count} multiprocessors), torch {torch.__version__}, "
            f"cuBLASLt {load_engine('cuda').cublaslt_version() or f'of CUDA {torch.version.cuda}'}"
        )
        self._room: dict[str, Tensor] = {}

    def ask(self, call: GemmCall, a: Tensor, b: Tensor, extras: Extras = NO_EXTRAS) -> Tensor:
        """Return some results of a call, as ``GPU.ask`` says.

        Raises:
            DeviceError: The GPU has too little memory for the call.
        """
        with self._refusals(call):
            rows, columns = self._positions(call.m, a.shape[0]), self._positions(call.n, b.shape[0])
            return self._call(call, a, b, extras, rows, columns)[rows[:, None], columns].cpu()

    def differing(self, call: GemmCall, a: Tensor, b: Tensor, extras: Extras = NO_EXTRAS) -> int:
        """Count results that differ where all should be equal, as ``GPU.differing`` says."""
        with self._refusals(call):
            rows, columns = (torch.arange(size, device=self.device) for size in (call.m, call.n))
            out = self._call(call, a, b, extras, rows, columns)
            bits = out.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()])
            return int((bits != bits[0, 0]).sum())

    def _call(self, call: GemmCall, a: Tensor, b: Tensor, extras: Extras, rows: Tensor, columns: Tensor) -> Tensor:
        """Return all results of a call with the given rows at their positions; one row stands for all."""
        a_matrix = self._matrix("a", a, rows, call.m, call.a_layout)
        right = self._matrix("b", b, columns, call.n, call.b_layout)
        bias = self._spread(extras.bias, columns, call.n)
        row, column = self._spread(extras.row, rows, call.m), self._spread(extras.column, columns, call.n)
        if call.scaling == "tensor":
            row, column = (None if x is None else x[:1] for x in (row, column))
        with _switches(call):
            return NATIVE[call.operation](call, a_matrix, right, Extras(bias, row, column))

    @contextlib.contextmanager
    def _refusals(self, call: GemmCall) -> Iterator[None]:
        """Say which call the GPU has no memory for, or refuses."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            self._room.clear()
            torch.cuda.empty_cache()
            raise DeviceError(
                f"{self.name} has no memory left for M={call.m} N={call.n} K={call.k} in {call.a}; choose fewer "
                "--tokens or a smaller model"
            ) from None
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"torch.{call.operation} on {self.name} refuses M={call.m} N={call.n} K={call.k} in {call.a}: "
                f"{first_line(error)}"
            ) from None

    def _positions(self, size: int, count: int) -> Tensor:
        return torch.linspace(0, size - 1, count, dtype=torch.float64, device=self.device).round().long()

    def _matrix(self, which: str, values: Tensor, positions: Tensor, size: int, layout: str) -> Tensor:
        k, dtype = values.shape[1], values.dtype
        flat = self._buffer(which, size * k * dtype.itemsize).view(dtype)
        matrix = flat.view(size, k) if layout == "row" else flat.view(k, size).t()
        raw = torch.uint8 if dtype.itemsize == 1 else dtype
        values = values.to(self.device).view(raw)
        if len(values) == 1 and len(positions) == size:
            matrix.view(raw).copy_(values.expand(size, k))
        else:
            matrix.view(raw)[positions] = values
        return matrix

    def _buffer(self, which: str, size: int) -> Tensor:
        buffer = self._room.get(which)
        if buffer is None or buffer.numel() < size:
            self._room.pop(which, None)
            del buffer
            self._room[which] = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._room[which][:size]

    def _spread(self, values: Tensor | None, positions: Tensor, size: int) -> Tensor | None:
        if values is None:
            return None
        spread = torch.zeros(size, dtype=values.dtype, device=self.device)
        spread[positions] = values.to(self.device)
        return spread


def _scaled_mm(call: GemmCall, a: Tensor, b: Tensor, extras: Extras) -> Tensor:
    many = call.scaling == "row"
    row, column = (
        torch.ones(size if many else 1, device=a.device) if scale is None else scale
        for size, scale in ((call.m, extras.row), (call.n, extras.column))
    )
    row, column = (row[:, None], column[None, :]) if many else (row.reshape(()), column.reshape(()))
    return torch._scaled_mm(a, b.t(), row, column, bias=extras.bias, out_dtype=call.out, use_fast_accum=call.fast_accum)


NATIVE: dict[str, Callable[[GemmCall, Tensor, Tensor, Extras], Tensor]] = {
    "mm": lambda call, a, b, _: torch.mm(a, b.t()) if call.out == a.dtype else torch.mm(a, b.t(), out_dtype=call.out),
    "linear": lambda call, a, b, extras: torch.nn.functional.linear(a, b, extras.bias),
    "scaled_mm": _scaled_mm,
    "int_mm": lambda call, a, b, _: torch._int_mm(a, b.t()),
}


@contextlib.contextmanager
def _switches(call: GemmCall) -> Iterator[None]:
    """Set torch's global switches as the call says, and put them back."""
    flags: Any = torch.backends.cuda.matmul
    before = flags.allow_tf32, flags.allow_fp16_accumulation
    flags.allow_tf32, flags.allow_fp16_accumulation = call.a == "tf32", call.accumulate == "fp16"
    try:
        yield
    finally:
        flags.allow_tf32, flags.allow_fp16_accumulation = before


def open_gpu(device: str | torch.device = "cuda") -> TorchGPU:
    """Return the GPU, after one small product has shown that it works.

    Raises:
        DeviceError: torch sees no GPU, or the GPU cannot be used now; the message says why and what to do.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        seen = "sees none" if torch.version.hip is None else f"is built for ROCm {torch.version.hip}"
        raise DeviceError(
            f"calibrate asks an NVIDIA GPU, and torch {seen} here; run it on the machine that has the GPU (the plan "
            "file it writes can be used anywhere)"
        )
    try:
        gpu = TorchGPU(torch.device(device))
        one = torch.ones(16, 16, device=gpu.device, dtype=torch.bfloat16)
        float(torch.mm(one, one)[0, 0])
        return gpu
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(
            f"{device} cannot be used: {first_line(error)}; see with nvidia-smi who else uses it, or choose another "
            "--device"
        ) from None
