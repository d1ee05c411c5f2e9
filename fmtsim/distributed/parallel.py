# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: layers that ranks share out, with low-precision messages between them.

One process can play all ranks: its layers then hold every rank's shard, and its values and gradients have the bits that
the ranks have.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmtsim.casts.arguments import check_module
from fmtsim.distributed.arithmetic import require_ranks
from fmtsim.distributed.collective import all_reduce, reduce_scatter
from fmtsim.distributed.gather import all_gather, require_whole, simulate_gather
from fmtsim.distributed.ranks import Ranks
from fmtsim.distributed.reduction import Reduction, get_reduction
from fmtsim.distributed.simulated_reduce import simulate
from fmtsim.formats.block import Format
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_types, checked

Model = TypeVar("Model", bound=nn.Module)
_POWERS: Final = Scaling(power_of_two="ceil")
_SUM: Final = replace(get_reduction("fp32"), average=False)
_LAYOUT: Final = {"column": ("out_features", 0), "row": ("in_features", 1)}  # what is shared out: features, dim


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """Describe the formats of tensors between ranks that share out layers.

    Args:
        gather: Format of the activations that ranks gather before a column-parallel layer (sequence parallelism); None
            sends them as they are.
        gradient: Format of the gradients that they gather before the backward pass of a row-parallel layer.
        scaling: How the one scale of a gathered tensor follows from its largest magnitude on all ranks; None for
            formats with scales of their own.
        reduction: Sums of partial results and of gradients: a name of ``REDUCTIONS`` or a record, taken as a sum.
        sequence: Ranks share out the tokens between the layers, too; else each holds all of them, and nothing is
            gathered.
        dim: The dimension of the tokens.

    The defaults are FP8-LM's: E4M3 before the all-gather, with a power of two as scale, and everything else in high
    precision.

    Source: Peng et al., FP8-LM, arXiv:2310.18313, section 2.3; Korthikanti et al., arXiv:2205.05198, section 4.

    Raises:
        ArgumentError: A scaling that the formats do not take; a reduction that draws random numbers or keeps a factor.
    """

    gather: Format | None = get_format("e4m3")
    gradient: Format | None = None
    scaling: Scaling | None = _POWERS
    reduction: Reduction = get_reduction("fp32")
    sequence: bool = True
    dim: int = -2

    if TYPE_CHECKING:  # what is taken is more than what fields hold

        def __init__(
            self, *, gather: str | Format | None = ..., gradient: str | Format | None = None,
            scaling: Scaling | None = ..., reduction: str | Reduction = ..., sequence: bool = True, dim: int = -2,
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("gather", "gradient"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else get_format(value))
            if value is not None and self.scaling is not None:
                require_whole(getattr(self, name), self.scaling)
        object.__setattr__(self, "reduction", replace(get_reduction(self.reduction), average=False))
        check_types(self)
        if self.reduction.auto is not None or self.reduction.rounding.mode == "stochastic":
            raise ArgumentError(
                f"TensorParallel reduction={self.reduction} remembers a factor or draws numbers; choose one with "
                "a fixed factor and rounding to nearest, such as 'fp32', 'bf16' or 'msamp'"
            )


class Partition:
    """Move activations and gradients between ranks, or between the ranks that this process plays.

    Args:
        settings: What travels.
        ranks: A number of ranks that this process plays, or those of a process group.

    Attributes:
        size: Number of ranks.
        here: How many of them are in this process: 1, or all.
    """

    def __init__(self, settings: TensorParallel, ranks: int | Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.size = ranks if isinstance(ranks, int) else ranks.size
        self.here = self.size if isinstance(ranks, int) else 1

    def gathered(self, x: Tensor, fmt: Format | None) -> Tensor:
        """Return all tokens of tensors of which each rank has its part, rounded to a format on the way."""
        if not self.settings.sequence:
            return x
        rows = self._rows(x)
        if isinstance(self.ranks, int):
            whole = (
                rows if fmt is None else simulate_gather(self._parts(rows), fmt, self.settings.scaling).flatten(0, 1)
            )
        elif fmt is None:
            self.ranks.agree(("all_gather", "as it is", tuple(rows.shape), str(rows.dtype)), rows.device)
            whole = rows.new_empty(self.ranks.size, *rows.shape)
            with self.ranks.answering("an all-gather"):
                dist.all_gather(list(whole.unbind()), rows, group=self.ranks.group)
            whole = whole.flatten(0, 1)
        else:
            whole = all_gather(rows, fmt, scaling=self.settings.scaling, group=self.ranks.group).flatten(0, 1)
        return whole.movedim(0, self.settings.dim)

    def summed(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of every rank's tensor of all tokens, or this rank's part of its tokens."""
        settings, rows = self.settings, [self._rows(part) for part in parts]
        if isinstance(self.ranks, int):
            if settings.sequence:
                self._parts(rows[0])  # refuses tokens that do not divide
            return simulate(rows, settings.reduction).values[0].movedim(0, settings.dim)
        if not settings.sequence:
            total = all_reduce(rows[0], settings.reduction, group=self.ranks.group).values[0]
        else:
            like = self._parts(rows[0])[0]
            total = reduce_scatter(rows[0], settings.reduction, group=self.ranks.group).values[0].reshape(like.shape)
        return total.movedim(0, settings.dim)

    def of_bias(self, gradient: Tensor) -> Tensor:
        """Return the gradient of a bias: each rank sums over its tokens, and the ranks' sums are added in float32."""
        rows = self._rows(gradient)
        shared = self.settings.sequence
        parts = self._parts(rows) if shared and isinstance(self.ranks, int) else (rows,)
        partial_sums = [part.flatten(0, -2).sum(0, dtype=torch.float32) for part in parts]
        if not shared:
            total = partial_sums[0]
        elif isinstance(self.ranks, int):
            total = simulate(partial_sums, _SUM).values[0]
        else:
            total = all_reduce(partial_sums[0], _SUM, group=self.ranks.group).values[0]
        return total.to(gradient.dtype)

    def _rows(self, x: Tensor) -> Tensor:
        dim = self.settings.dim
        if not -x.dim() <= dim < x.dim():
            raise ArgumentError(
                f"dim={dim} of the tokens is not one of x of shape {tuple(x.shape)}; pass TensorParallel(dim=)"
            )
        return x.detach().movedim(dim, 0).contiguous()

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        if len(rows) % self.size:
            raise ArgumentError(
                f"{len(rows)} tokens (dim={self.settings.dim}) do not divide among {self.size} ranks; pad them, or "
                "pass TensorParallel(sequence=False)"
            )
        return rows.chunk(self.size)


class _Spread(torch.autograd.Function):  # no operator takes the Partition, which exchanges bytes with other ranks
    """Give the ranks that are here all tokens; the backward pass sums their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, partition: Partition) -> tuple[Tensor, ...]:
        ctx.partition = partition
        whole = partition.gathered(x, partition.settings.gather)
        return tuple(whole.clone() for _ in range(partition.here))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.partition.summed(gradients), None


class _Collect(torch.autograd.Function):
    """Sum what the ranks have; the backward pass gives all of them the gradient of all tokens."""

    @staticmethod
    def forward(ctx: Any, partition: Partition, *parts: Tensor) -> Tensor:
        ctx.partition = partition
        return partition.summed(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        whole = ctx.partition.gathered(gradient, ctx.partition.settings.gradient)
        return None, *(whole,) * ctx.partition.here


class _AddBias(torch.autograd.Function):
    """Add a bias that all ranks have."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, partition: Partition) -> Tensor:
        ctx.partition = partition
        return y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return gradient, ctx.partition.of_bias(gradient), None


class ParallelLinear(nn.Module):
    """Compute a linear layer of which each rank has a shard, ``shards.0``; one process that plays ranks has them all.

    Args:
        linear: The whole layer, with the same numbers on all ranks.
        how: ``"column"`` shares out the outputs: each rank computes its features of all tokens. ``"row"`` shares out
            the inputs: what the ranks compute is summed, and the bias, which all have, is added to the sum.
        partition: What travels between which ranks.
    """

    def __init__(self, linear: nn.Linear, how: Literal["column", "row"], partition: Partition) -> None:
        super().__init__()
        self.how, self.partition = how, partition
        features, dim = _LAYOUT[how]
        if getattr(linear, features) % partition.size:
            raise ArgumentError(f"{features}={getattr(linear, features)} does not divide among {partition.size} ranks")
        mine = (
            slice(None) if isinstance(partition.ranks, int) else slice(partition.ranks.rank, partition.ranks.rank + 1)
        )
        weights = linear.weight.chunk(partition.size, dim)[mine]
        biases: Sequence[Tensor | None] = [None] * partition.here
        if linear.bias is not None and how == "column":
            biases = linear.bias.chunk(partition.size)[mine]
        self.shards = nn.ModuleList(_linear(w, b) for w, b in zip(weights, biases, strict=True))
        self.bias = linear.bias if how == "row" else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``: a rank's part of the tokens or of the features, in one process all."""
        if self.how == "column":
            every = _Spread.apply(x, self.partition)
            return torch.cat([shard(part) for shard, part in zip(self.shards, every, strict=True)], -1)
        parts = [shard(part) for shard, part in zip(self.shards, x.chunk(self.partition.here, -1), strict=True)]
        y: Tensor = _Collect.apply(self.partition, *parts)
        return y if self.bias is None else _AddBias.apply(y, self.bias, self.partition)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Show how it is shared out."""
        played = ", all in this process" if isinstance(self.partition.ranks, int) else ""
        return f"{self.how} parallel over {self.partition.size} ranks{played}"


def parallelize(
    model: Model,
    *,
    column: str,
    row: str,
    settings: TensorParallel | None = None,
    ranks: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Model:
    """Share out linear layers of a model among ranks, in place; call it before ``fmtsim.convert``.

    Args:
        model: The same on all ranks. Under sequence parallelism each rank passes its part of the tokens.
        column: A regular expression that the names of layers contain whose outputs are shared out (queries, keys and
            values; gate and up).
        row: The same for those whose inputs are (the projections behind attention; down).
        settings: What travels; None is ``TensorParallel()``.
        ranks: Play so many ranks in this process; None shares out among the ranks of a process group.
        group: The ranks; None is the default group.

    Each rank's shard is an ordinary ``nn.Linear``, so a recipe quantises it with a scale of its own; rules of recipes
    see ``NAME.shards.0``. Values between a column-parallel and a row-parallel layer are shared out by features:
    attention has the rank's heads. Gradients of parameters outside of these layers (norms, embeddings) are those of the
    rank's tokens: sum them over the ranks before a step. Deterministic, except as the products of the layers are.

    Raises:
        ArgumentError: A pattern fits no linear layer, or both fit one; features do not divide; ranks= beside group=.

    >>> net = parallelize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), column="0", row="2", ranks=2)
    >>> net[2].shards[0].weight.shape, net(torch.ones(4, 8)).shape
    (torch.Size([8, 8]), torch.Size([4, 8]))
    """
    check_module("parallelize", model)
    if ranks is not None and group is not None:
        raise ArgumentError(f"ranks={shown(ranks)} plays ranks in this process, group= has real ones; pass one of them")
    chosen = TensorParallel() if settings is None else checked("settings", settings, TensorParallel)
    if ranks is not None:
        require_ranks(checked("ranks", ranks, int))
    partition = Partition(chosen, Ranks(group) if ranks is None else ranks)
    names = {how: _matching(model, how, pattern) for how, pattern in (("column", column), ("row", row))}
    both = names["column"].keys() & names["row"].keys()
    if both:
        raise ArgumentError(f"column={column!r} and row={row!r} both fit {min(both)!r}; make them differ")
    parallel: dict[str, ParallelLinear] = {}
    for how, layers in names.items():
        for name, linear in layers.items():
            try:
                parallel[name] = ParallelLinear(linear, how, partition)  # type: ignore[arg-type]
            except ArgumentError as error:
                raise ArgumentError(f"layer {name!r}: {error}; choose other ranks, or leave it out of {how}=") from None
    for name, layer in parallel.items():
        model.set_submodule(name, layer)
    return model


def _matching(model: nn.Module, how: str, pattern: str) -> dict[str, nn.Linear]:
    try:
        fits = re.compile(checked(how, pattern, str)).search
    except re.error:
        raise ArgumentError(
            f"{how}={shown(pattern)} is not a regular expression; write 'q_proj|k_proj|v_proj'"
        ) from None
    linears = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and name}
    matching = {name: layer for name, layer in linears.items() if fits(name)}
    if not matching:
        some = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears)) or "there is none"
        raise ArgumentError(
            f"{how}={shown(pattern)} fits no plain nn.Linear of {type(model).__name__}; they are: {some}"
        )
    return matching


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a layer with copies of these Parameters, without drawing initial ones."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer
