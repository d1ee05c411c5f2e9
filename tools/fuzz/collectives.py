# SPDX-License-Identifier: Apache-2.0
"""Targets that take gradients and shards of ranks, on a process group of this process alone."""

import inspect
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fmtsim
from fmtsim import distributed
from tools.fuzz import tensors
from tools.fuzz.calls import Values, either, junk_of, maybe, target

WIRES = ("e4m3", "e5m2", "int8", "bf16", "e2m1", "nf4", "logfmt8", "mxfp8_e4m3", "nvfp4", "int4_g32", "e4m3_128x128")


def _alone() -> None:
    """Make the group that a collective needs."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _floats(r: Random, *of: int) -> Tensor:
    return tensors.tensor(r, dtypes=tensors.FLOATS, of=of or None)


def _reduction(r: Random) -> Any:
    return either(r, r.choice(list(distributed.REDUCTIONS)), 0.1)


@target("simulate", 40, failed=(13561687937344582101, 13833619380342911950, 9810141142777416071))
def _simulate(r: Random) -> tuple[Any, list[Any], Values]:
    size = tensors.shape(r)
    lists = either(r, [tensors.tensor(r, dtypes=(torch.float32,), of=size) for _ in range(r.randint(0, 4))], 0.05)
    return distributed.simulate, [lists, _reduction(r)], maybe(r, {}, mu=(None, 1.0), call=(0, 1, 7))


@target("all_reduce", 40, failed=(11901704303241087277, 7448045565710321903))
def _all_reduce(r: Random) -> tuple[Any, list[Any], Values]:
    _alone()
    dtype = (r.choice(tensors.FLOATS),)
    several = [tensors.tensor(r, dtypes=dtype) for _ in range(r.randint(0, 3))]
    values = either(r, r.choice((several, tensors.tensor(r, dtypes=dtype))), 0.05)
    return distributed.all_reduce, [values, _reduction(r)], maybe(r, {}, mu=(None, 1.0), call=(0, 3), group=(None,))


@target("reduce_scatter", 40, failed=(127345114238764297, 17737150683747011729, 6272020504636244504))
def _reduce_scatter(r: Random) -> tuple[Any, list[Any], Values]:
    _alone()
    x = either(r, _floats(r), 0.05)
    count = x.numel() if isinstance(x, Tensor) and not x.is_nested else 4
    options = maybe(r, {}, sizes=((count,), (1, count - 1), (0, count), [count, 0], (2,)), mu=(None, 0.5), call=(1,))
    return distributed.reduce_scatter, [x, _reduction(r)], options


@target(
    "all_gather",
    40,
    failed=(
        15454512335289991915,
        2162688566524135716,
        18284877845180272320,
        17233098738588665510,
        16231162082575339197,
        7871451903267325820,
        3279868114756780130,
        4551677208314989751,
    ),
)
def _all_gather(r: Random) -> tuple[Any, list[Any], Values]:
    _alone()
    x = either(r, _floats(r), 0.05)
    count = x.numel() if isinstance(x, Tensor) and not x.is_nested else 4
    options = maybe(
        r, {}, scaling=(None, None, None, fmtsim.Scaling()), sizes=((count,), (1, count - 1), (0, count), [count]),
        group=(None,),
    )  # fmt: skip
    return distributed.all_gather, [x, either(r, r.choice(WIRES))], options


@target("dispatch", 40, failed=(282892603790280233, 2794600744136426488))
def _dispatch(r: Random) -> tuple[Any, list[Any], Values]:
    _alone()
    rows, width = r.choice((0, 1, 3, 8)), r.choice((0, 1, 32, 33, 128))
    counts = r.choice(([rows], (rows,), torch.tensor([rows]), [rows + 1], [0, rows], [-1], [True], []))
    return (
        distributed.dispatch,
        [either(r, _floats(r, rows, width), 0.05), either(r, counts, 0.1)],
        maybe(r, {}, format=WIRES, group=(None,)),
    )


@target(
    "ranks",
    32,
    failed=(
        7661686643443715854,
        632239081504654044,
        478496183479255067,
        15241256800049581905,
        683072900382870338,
        1098285843362497214,
    ),
)
def _ranks(r: Random) -> tuple[Any, list[Any], Values]:
    """Verbs of reductions that take no gradient."""
    _alone()
    state = distributed.ReductionState("fp8lm")
    verb = r.choice(
        (distributed.whole_tensors, distributed.ReductionState, distributed.hook_fsdp, distributed.fp8_hook,
         state.load_state_dict, distributed.get_reduction)
    )  # fmt: skip
    good: Values = {}
    if verb == state.load_state_dict:
        good = {"state": either(r, {**state.state_dict(), r.choice(("mu", "steps", "calls")): tensors.junk(r)}, 0.1)}
    elif verb is distributed.whole_tensors:
        good = {"sizes": [4, 10, 5], "ranks": r.choice((1, 2, 7))}
    elif verb is distributed.hook_fsdp:
        good = {"model": torch.nn.Linear(2, 2), "state": r.choice((None, state))}

    def run(**options: Any) -> None:
        verb(**options)

    run.__name__ = getattr(verb, "__name__", "run")
    if verb == state.load_state_dict and r.random() < 0.8:
        return run, [], good
    wrong = junk_of(r, verb, good)
    needed = {name: tensors.junk(r) for name, p in inspect.signature(verb).parameters.items() if p.default is p.empty}
    return run, [], needed | wrong
