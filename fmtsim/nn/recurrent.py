# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers step by step, with quantised operands in the products of inputs, states and projections."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fmtsim.nn.modules import EmulatedModule, register_emulated
from fmtsim.support.errors import ArgumentError

States = tuple[Tensor, ...]


class EmulatedRecurrent(EmulatedModule, nn.RNNBase):
    """Apply a recurrent layer by its steps: one product with all inputs, and one with the state in every step.

    Gates stand in torch's order and are made by torch's operations, so that in float32, without quantisers, outputs
    and states have the bits of torch's own loop on a CPU; oneDNN's and cuDNN's fused calls round elsewhere. The
    gradient of a state's weight is a sum of one product a step, in the order that autograd adds them.
    """

    @property
    def parts(self) -> tuple[str, ...]:  # type: ignore[override]  # they depend on the number of layers
        """Names of the products: ``ih_l0`` with the inputs, ``hh_l0`` with the state, ``hr_l0`` the projection."""
        kinds = ("ih", "hh", "hr") if self.proj_size else ("ih", "hh")
        return tuple(f"{kind}{suffix}" for suffix in _suffixes(self) for kind in kinds)

    @staticmethod
    def matrices(module: Any) -> Iterator[tuple[int, int]]:
        """Yield the size of each weight."""
        for part in EmulatedRecurrent.parts.fget(module):  # type: ignore[attr-defined]  # of the original class, too
            yield tuple(getattr(module, f"weight_{part}").shape)

    def input_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a batch of so many sequences of one step."""
        return ((rows, 1, self.input_size) if self.batch_first else (1, rows, self.input_size),)

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """Return outputs and last states, shaped as those of the original class."""
        if isinstance(input, PackedSequence):
            raise ArgumentError(
                f"layer {self.emulation.name if self.emulation else ''!r}: an emulated {self.original_class.__name__} "
                "takes no packed sequences; pass padded ones (torch.nn.utils.rnn.pad_packed_sequence)"
            )
        dim, alone = (0 if self.batch_first else 1), input.dim() == 2
        x = input.unsqueeze(dim) if alone else input
        several = self.mode == "LSTM"
        states = hx if several or hx is None else (hx,)
        if states is None:
            widths = (self.proj_size or self.hidden_size, self.hidden_size)[: 1 + several]
            states = tuple(x.new_zeros(len(_suffixes(self)), x.shape[dim], width) for width in widths)
        elif alone:
            states = tuple(state.unsqueeze(1) for state in states)
        self.check_forward_args(x, states if several else states[0], None)  # type: ignore[arg-type]  # LSTM's own
        steps = x.transpose(0, 1) if self.batch_first else x
        last: list[States] = []
        for layer, suffixes in enumerate(zip(*[iter(_suffixes(self))] * (1 + self.bidirectional), strict=True)):
            outputs = []
            for suffix in suffixes:
                y, final = self._run(steps, tuple(state[len(last)] for state in states), suffix)
                outputs.append(y)
                last.append(final)
            steps = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            if self.dropout and self.training and layer < self.num_layers - 1:
                steps = F.dropout(steps, self.dropout, True)
        y = steps.transpose(0, 1) if self.batch_first else steps
        finals = [torch.stack(parts) for parts in zip(*last, strict=True)]
        if alone:
            y, finals = y.squeeze(dim), [state.squeeze(1) for state in finals]
        return y, tuple(finals) if several else finals[0]

    def _run(self, steps: Tensor, state: States, suffix: str) -> tuple[Tensor, States]:
        """Run one direction of a layer; return its outputs and last state."""
        names = ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh")
        w_ih, w_hh, w_hr, b_ih, b_hh = (getattr(self, f"{name}{suffix}", None) for name in names)
        # 1. the inputs of all steps in one product
        inputs = self.gemm(steps, w_ih, b_ih, f"ih{suffix}").unbind(0)  # type: ignore[arg-type]
        back = suffix.endswith("_reverse")
        outputs = []
        for gates in reversed(inputs) if back else inputs:
            # 2. the state's product, then the gates
            hidden = self.gemm(state[0], w_hh, b_hh, f"hh{suffix}")  # type: ignore[arg-type]
            state = _STEPS[self.mode](gates, hidden, *state)
            if self.proj_size:
                state = self.gemm(state[0], w_hr, None, f"hr{suffix}"), state[1]  # type: ignore[arg-type]
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if back else outputs), state


def _suffixes(module: nn.RNNBase) -> list[str]:
    """Return how the names of the weights end, in the order of torch's states: by layer, then direction."""
    ways = ("", "_reverse") if module.bidirectional else ("",)
    return [f"_l{layer}{way}" for layer in range(module.num_layers) for way in ways]


def _lstm(inputs: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> States:
    """Return state and cell from gates in the order input, forget, cell, output."""
    i, f, g, o = (hidden + inputs).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(inputs: Tensor, hidden: Tensor, h: Tensor) -> States:
    """Return the state from gates in the order reset, update, new; the reset gate meets the product with the state."""
    width = 2 * h.shape[1]
    # views of one sum, as torch has them: its vector code treats the ends of rows as those of its own rows
    r, z = (gate.sigmoid() for gate in (hidden[:, :width] + inputs[:, :width]).chunk(2, 1))
    n = (inputs[:, width:] + hidden[:, width:] * r).tanh()
    return ((h - n) * z + n,)


_STEPS: dict[str, Callable[..., States]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": lambda inputs, hidden, h: ((hidden + inputs).tanh(),),
    "RNN_RELU": lambda inputs, hidden, h: ((hidden + inputs).relu(),),
}

for _cls in (nn.LSTM, nn.GRU, nn.RNN):
    _name = f"Emulated{_cls.__name__}"
    register_emulated(type(_name, (EmulatedRecurrent, _cls), {"original_class": _cls, "__module__": __name__}))
