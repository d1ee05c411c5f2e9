# SPDX-License-Identifier: Apache-2.0
"""Which of torch's operators ``simulate`` computes, by what; it is imported when a simulation begins."""

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Literal

import torch

from fmtsim.gemm.products.matmul import bmm, linear, mm
from fmtsim.gemm.products.resolver import seen_calls
from fmtsim.gemm.targets.target import Target, get_target
from fmtsim.machine import (
    arrays,
    attention,
    attention_efficient,
    attention_flash,
    attention_rows,
    batch_norm,
    convolution,
    elementwise,
    group_norm,
    indexing,
    loss,
    norm,
    optimizer_kernels,
    pointwise,
    reduce,
    scan,
    softmax,
    sorting,
)  # fmt: skip
from fmtsim.machine import random as random
from fmtsim.machine.arrays import canonical as canonical
from fmtsim.machine.unknown import BySource, Guess, UnknownOrder
from fmtsim.support.errors import ArgumentError, PlanUnknownWarning

_ATEN = torch.ops.aten

# Operators that move data, compare, count, or round once what torch computes exactly or in float32 on both devices.
_NAMES = """
view _unsafe_view transpose t permute detach alias expand unsqueeze squeeze slice select split split_with_sizes chunk
cat stack clone neg abs _to_copy embedding arange equal ne eq gt lt ge le all any _local_scalar_dense constant_pad_nd
ones_like zeros_like full_like empty_like empty empty_strided zeros ones full scalar_tensor new_zeros new_empty
new_full new_ones new_empty_strided slice_backward select_backward fill_ zero_ copy_ where masked_fill masked_fill_
lift_fresh tril triu logical_not logical_and logical_or bitwise_and bitwise_or bitwise_not repeat_interleave gather
index index_select _reshape_alias reshape histc argmax argmin isnan isinf isfinite nan_to_num eye _foreach_neg
_foreach_sub_ leaky_relu leaky_relu_backward sgn unbind flip roll repeat as_strided sign floor ceil round trunc set_
resize_ _amp_update_scale_ _amp_foreach_non_finite_check_and_unscale_ complex view_as_real view_as_complex to unsqueeze_
is_same_size _has_same_storage_numel _efficientzerotensor _new_zeros_with_same_feature_meta
"""
SAME = frozenset(getattr(_ATEN, name) for name in _NAMES.split())


def _rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.movedim(dim, -1).contiguous() if x.ndim else x.reshape(1)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool, log: bool) -> torch.Tensor:
    inner, dtype = math.prod(x.shape[dim % max(x.ndim, 1) + 1 :]), torch.float32 if half_to_float else x.dtype
    rows = _rows(x, dim)
    plan = None if inner == 1 else softmax.spatial_plan(rows.shape[-1], inner, x.element_size())
    y = softmax.forward(rows, log, dtype, plan)
    return y.movedim(-1, dim).contiguous() if x.ndim else y.reshape(())


def _safe_softmax(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    """Return softmax, and zeros for rows of -Inf."""
    if dtype not in (None, x.dtype):
        raise UnknownOrder("softmax that converts its input")
    return _softmax(x, dim, False, False).masked_fill((x == -torch.inf).all(dim, keepdim=True), 0.0)


def _softmax_gradient(g: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype, log: bool) -> torch.Tensor:
    arrays.check_shapes("the gradient of softmax", g=(g, y.shape))
    inner, rows = math.prod(y.shape[dim % max(y.ndim, 1) + 1 :]), _rows(y, dim)
    plan = None if inner == 1 else softmax.spatial_plan(rows.shape[-1], inner, g.element_size())
    dx = softmax.backward(_rows(g, dim), rows, log, dtype, plan)
    return dx.movedim(-1, dim).contiguous() if y.ndim else dx.reshape(())


def _sum(x: torch.Tensor, dims: Any, keepdim: bool, dtype: Any, mean: bool) -> torch.Tensor:
    if not x.is_floating_point():
        return torch.sum(x, dims or list(range(x.ndim)), keepdim, dtype=dtype)
    return reduce.reduce(x, list(dims) if dims else None, keepdim, mean, dtype or x.dtype)


def _batch_norm_backward(
    g: torch.Tensor, x: torch.Tensor, weight: Any, running_mean: Any, running_var: Any, mean: Any, rstd: Any,
    *rest: Any,
) -> Any:  # fmt: skip
    tensors = g, x, weight, running_mean, running_var
    try:
        return batch_norm.batch_norm_backward(*tensors, mean, rstd, *rest)
    except UnknownOrder as reason:
        # the host keeps statistics in the parameters' dtype
        saved = [t if t is None else t.to(x.dtype if weight is None else weight.dtype) for t in (mean, rstd)]
        raise UnknownOrder(reason.args[0], _ATEN.native_batch_norm_backward(*tensors, *saved, *rest)) from None


def _extreme(extreme: Callable) -> Callable:
    def call(x: torch.Tensor, *rest: Any, **options: Any) -> Any:
        y = extreme(x, *rest, **options)
        if torch.is_tensor(y) and bool((y == 0).any()) and len(x[x == 0].signbit().unique()) > 1:
            raise UnknownOrder("the sign of an extreme that is zero, among zeros of both signs")
        return y

    return call


def _check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **like: torch.Tensor) -> None:
    """Refuse tensors of attention that do not fit: k and v by q, and tensors that are ``like`` the output."""
    count, heads, _, d = q.shape
    groups = k.shape[1] if k.ndim == q.ndim and k.shape[1] and heads % k.shape[1] == 0 else heads
    shape = count, groups, k.shape[-2]
    check = arrays.check_shapes
    check("attention", k=(k, (*shape, d)), v=(v, (*shape, v.shape[-1])))
    check("attention", **{name: (x, (*q.shape[:-1], v.shape[-1])) for name, x in like.items()})


def _attention(
    run: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, causal: bool = False, *,
    attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _check_attention(q, k, v)
    backends, options = torch.backends.cuda, (attn_mask, dropout, causal, scale)
    if q.dtype == torch.float32 and attention_efficient.takes_math_path(q, k):
        return attention_efficient.math_forward(run, q, k, v, *options)
    if q.dtype == torch.float32:
        if not backends.mem_efficient_sdp_enabled():
            raise UnknownOrder("float32 attention without the memory-efficient kernel, which sdpa_kernel switched off")
        return attention_efficient.forward(q, k, v, *options)
    if not backends.cudnn_sdp_enabled() and q.shape[-1] % 8 == 0:
        raise UnknownOrder("attention without cuDNN, which sdpa_kernel switched off")
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise UnknownOrder("attention under use_deterministic_algorithms, for which PyTorch takes another kernel")
    if dropout or (causal and (attn_mask is not None or q.shape[-2] == 1)):
        raise UnknownOrder("attention with dropout, or causal with a mask or one query")
    if q.shape[-1] % 8 and attn_mask is None:
        return attention_flash.forward(q, k, v, causal, scale)
    if attn_mask is not None or q.shape[-2] == 1:
        return attention_rows.forward(q, k, v, attn_mask, scale)
    return attention.forward(q, k, v, None, dropout, causal, scale)


def _attention_gradient(
    run: Any, g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor,
    logsumexp: torch.Tensor, dropout: float, causal: bool, *, attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    _check_attention(q, k, v, g=g, output=output)
    options = attn_mask, dropout, causal, scale
    if q.dtype != torch.float32 and q.shape[-1] % 8 and attn_mask is None and not dropout:
        return attention_flash.backward(g, q, k, v, output, logsumexp, causal, scale)
    if q.dtype != torch.float32:
        return attention.backward(g, q, k, v, output, logsumexp, *options)
    if attention_efficient.takes_math_path(q, k):
        return attention_efficient.math_backward(run, g, q, k, v, *options)
    return attention_efficient.backward(g, q, k, v, output, logsumexp, *options)


# Operators that a GPU's trace has in place of the host's, for audit.
def _cudnn(
    run: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, _: bool, dropout: float = 0.0,
    causal: bool = False, debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    output, logsumexp = _attention(run, q, k, v, dropout, causal, attn_mask=bias, scale=scale)
    nothing, seed = output.new_empty(0), torch.zeros((), dtype=torch.int64)
    return output, logsumexp[..., None], nothing, nothing, q.shape[2], k.shape[2], seed, seed.clone(), nothing


def _cudnn_gradient(
    run: Any, g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor,
    logsumexp: torch.Tensor, *state: Any, scale: float | None = None,
) -> Any:  # fmt: skip
    _, _, bias, _, _, _, _, dropout, causal = state
    sums = logsumexp.reshape(q.shape[:3])
    return _attention_gradient(run, g, q, k, v, output, sums, dropout, causal, attn_mask=bias, scale=scale)


def _efficient(
    run: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, _: bool, dropout: float = 0.0,
    causal: bool = False, *, scale: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    _check_attention(q, k, v)
    output, sums = attention_efficient.forward(q, k, v, bias, dropout, causal, scale)
    seed = torch.zeros((), dtype=torch.int64)
    # the GPU stores rows of multiples of 32
    return output, torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32), value=torch.inf), seed, seed.clone()


def _efficient_gradient(
    run: Any, g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, output: torch.Tensor,
    logsumexp: torch.Tensor, seed: Any, offset: Any, dropout: float, mask: Any, causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    _check_attention(q, k, v, g=g, output=output)
    sums = logsumexp[..., : q.shape[2]].contiguous()
    options = bias, dropout, causal, scale, mask[0], mask[3]
    return attention_efficient.backward(g, q, k, v, output, sums, *options)


def _flash(
    run: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, causal: bool = False,
    debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    if dropout:
        raise UnknownOrder("attention with dropout")
    _check_attention(q, k, v)
    output, logsumexp = attention_flash.forward(q, k, v, causal, scale)
    nothing, state = output.new_empty(0), torch.zeros(2, dtype=torch.uint64)
    return output, logsumexp, None, None, q.shape[2], k.shape[2], state, torch.zeros((), dtype=torch.uint64), nothing


def _flash_gradient(
    run: Any, g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor,
    logsumexp: torch.Tensor, *state: Any, scale: float | None = None,
) -> Any:  # fmt: skip
    if state[4]:
        raise UnknownOrder("attention with dropout")
    _check_attention(q, k, v, g=g, output=output)
    return attention_flash.backward(g, q, k, v, output, logsumexp, state[5], scale)


STABLE = frozenset((_ATEN.sort, _ATEN.topk))  # of integers, too


def _rms_norm_backward(g: torch.Tensor, x: torch.Tensor, shape: Any, weight: Any, rstd: torch.Tensor, mask: Any) -> Any:
    return norm.layer_norm_backward(g, x, shape, None, rstd, weight, [True, True, False])[:2]


_COMPOSITE = frozenset((_ATEN.binary_cross_entropy_with_logits,))


def _composite(packet: Any) -> Callable:
    """Return an operator that torch makes of others on every device: these come to the simulation."""

    def call(run: Any, *args: Any, **kwargs: Any) -> Any:
        with run, torch._C.DisableTorchFunction():
            return packet.default._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)

    return call


def _packets(table: dict[str, Callable]) -> dict[Any, Callable]:
    return {getattr(_ATEN, name): operator for name, operator in table.items()}


_UNARY = "exp exp2 expm1 log log2 log10 log1p tanh erf sin cos rsqrt sqrt sigmoid silu"
KNOWN: dict[Any, Callable] = {
    _ATEN._fused_rms_norm: norm.rms_norm,
    _ATEN._fused_rms_norm_backward: lambda g, x, shape, rstd, weight, mask: _rms_norm_backward(
        g, x, shape, weight, rstd, mask
    ),
    _ATEN._softmax: lambda x, dim, half: _softmax(x, dim, half, False),
    _ATEN._safe_softmax: _safe_softmax,
    _ATEN._log_softmax: lambda x, dim, half: _softmax(x, dim, half, True),
    _ATEN._softmax_backward_data: lambda g, y, dim, dtype: _softmax_gradient(g, y, dim, dtype, False),
    _ATEN._log_softmax_backward_data: lambda g, y, dim, dtype: _softmax_gradient(g, y, dim, dtype, True),
    _ATEN.sum: lambda x, dims=None, keepdim=False, dtype=None: _sum(x, dims, keepdim, dtype, False),
    _ATEN.mean: lambda x, dims=None, keepdim=False, dtype=None: _sum(x, dims, keepdim, dtype, True),
    **{getattr(_ATEN, name): _extreme(getattr(_ATEN, name)) for name in ("amax", "amin", "max", "min")},
    _ATEN.var: lambda x, dims=None, **options: reduce.var_mean(x, dims, **options)[0],
    _ATEN.std: lambda x, dims=None, **options: reduce.var_mean(x, dims, root=True, **options)[0],
    _ATEN.var_mean: reduce.var_mean,
    _ATEN.std_mean: lambda x, dims=None, **options: reduce.var_mean(x, dims, root=True, **options),
    _ATEN.native_layer_norm: norm.layer_norm,
    _ATEN.native_layer_norm_backward: lambda g, x, shape, mean, rstd, w, b, mask: norm.layer_norm_backward(
        g, x, shape, mean, rstd, w, mask
    ),
    _ATEN.native_batch_norm: batch_norm.batch_norm,
    _ATEN.native_batch_norm_backward: _batch_norm_backward,
    _ATEN.native_group_norm: group_norm.group_norm,
    _ATEN.native_group_norm_backward: group_norm.group_norm_backward,
    _ATEN.nll_loss_forward: loss.nll_loss,
    _ATEN.nll_loss_backward: loss.nll_loss_backward,
    _ATEN.nll_loss2d_forward: loss.nll_loss,
    _ATEN.nll_loss2d_backward: loss.nll_loss_backward,
    **{packet: _composite(packet) for packet in _COMPOSITE},
    _ATEN.embedding_dense_backward: loss.embedding_backward,
    _ATEN.convolution: convolution.convolution,
    _ATEN.convolution_backward: convolution.convolution_backward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_gradient,
    _ATEN._scaled_dot_product_cudnn_attention: _cudnn,
    _ATEN._scaled_dot_product_cudnn_attention_backward: _cudnn_gradient,
    _ATEN._scaled_dot_product_flash_attention: _flash,
    _ATEN._scaled_dot_product_flash_attention_backward: _flash_gradient,
    _ATEN._scaled_dot_product_efficient_attention: _efficient,
    _ATEN._scaled_dot_product_efficient_attention_backward: _efficient_gradient,
    _ATEN._fused_adamw_: optimizer_kernels.fused_adamw_,
    _ATEN._foreach_norm: lambda tensors, order=2, dtype=None: optimizer_kernels.foreach_norm(tensors, order),
    _ATEN._foreach_add_: optimizer_kernels.foreach(pointwise.add),
    _ATEN._foreach_add: optimizer_kernels.foreach(pointwise.add, in_place=False),
    _ATEN._foreach_mul_: optimizer_kernels.foreach(torch.mul),  # the host's own rounds the factor to 16 bits
    _ATEN._foreach_mul: optimizer_kernels.foreach(torch.mul, in_place=False),
    _ATEN._foreach_div_: optimizer_kernels.foreach_divide_,
    _ATEN._foreach_lerp_: optimizer_kernels.foreach(optimizer_kernels.lerp),
    _ATEN._foreach_addcmul_: optimizer_kernels.foreach(optimizer_kernels.addcmul),
    _ATEN._foreach_addcdiv_: optimizer_kernels.foreach(optimizer_kernels.addcdiv),
    _ATEN._foreach_sqrt: optimizer_kernels.foreach(pointwise.unary("sqrt"), in_place=False),
    _ATEN.lerp: lambda x, end, weight: (
        elementwise.elementwise("lerp", x, end, weight)
        if torch.is_tensor(weight)
        else optimizer_kernels.lerp(x, end, weight)
    ),
    _ATEN.addcmul: lambda x, a, b, *, value=1: optimizer_kernels.addcmul(x, a, b, value),
    _ATEN.addcdiv: lambda x, a, b, *, value=1: optimizer_kernels.addcdiv(x, a, b, value),
    _ATEN.native_dropout_backward: random.dropout_backward,
    _ATEN.gelu: pointwise.gelu,
    _ATEN.gelu_backward: pointwise.gelu_backward,
    _ATEN.silu_backward: pointwise.silu_backward,
    _ATEN.tanh_backward: pointwise.tanh_backward,
    _ATEN.add: pointwise.add,
    _ATEN.mul: pointwise.multiply,
    _ATEN.rsub: pointwise.subtract_from,
    _ATEN.sub: lambda a, b, *, alpha=1: pointwise.add(a, b, alpha=-alpha),
    _ATEN.index_put: loss.index_put,
    _ATEN.div: pointwise.divide,
    _ATEN.pow: pointwise.power,
    _ATEN.cumsum: lambda x, dim, dtype=None: scan.scan(x, dim, dtype, False),
    _ATEN.cumprod: lambda x, dim, dtype=None: scan.scan(x, dim, dtype, True),
    _ATEN.linalg_vector_norm: lambda x, order=2, dim=None, keepdim=False, dtype=None: reduce.vector_norm(
        x, order, dim, keepdim, dtype or x.dtype
    ),
    _ATEN.topk: sorting.topk,
    _ATEN.sort: sorting.sort,
    **{getattr(_ATEN, name): pointwise.unary(name) for name in _UNARY.split()},
    **_packets(elementwise.OPERATORS | indexing.OPERATORS),
    _ATEN.reciprocal: lambda x: torch.reciprocal(x) if x.dtype == torch.float64 else pointwise.unary("reciprocal")(x),
}  # fmt: skip

_NORMS = "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward"
_SOFTMAX = "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data gelu gelu_backward silu_backward"
KERNELS = frozenset(getattr(_ATEN, name) for name in f"{_NORMS} {_SOFTMAX} {_UNARY}".split())
"""Operators of KNOWN whose kernels write the GPU's NaN: their results are not searched for others."""


def _in_place(operator: Callable) -> Callable:
    def write(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        try:
            return x.copy_(operator(x, *rest, **options))
        except (Guess, BySource) as reason:
            raise type(reason)(reason.args[0], x.copy_(reason.args[1])) from None

    return write


# An operator of KNOWN in place: its result, rounded once more where x's dtype is narrower than the result's.
_WRITERS = {f"{packet.__name__}_": operator for packet, operator in KNOWN.items() if "_foreach" not in packet.__name__}
KNOWN |= {getattr(_ATEN, name): _in_place(operator) for name, operator in _WRITERS.items() if hasattr(_ATEN, name)}


def _known_product(verb: Callable, *operands: torch.Tensor, target: str, **asked: Any) -> torch.Tensor:
    """Return a product in the order of a target's plan, with the switches of torch.backends.cuda.matmul.

    ``asked`` are further options of the verb: ``out_dtype``, ``plan``.

    Raises:
        Guess: The plan is a guess; the result by it is what the exception holds.
    """
    tensors = [operand.detach() for operand in operands]
    if tensors[0].shape[-1] == 1 and verb is not linear:
        wide = asked.get("out_dtype") or tensors[0].dtype
        return tensors[0].to(wide) * tensors[1].to(wide) + 0.0  # one product, added to a zero
    switches = torch.backends.cuda.matmul
    allow = ("tf32",) * (switches.fp32_precision == "tf32") + ("fp16_accumulation",) * switches.allow_fp16_accumulation
    options = {"target": target, "allow": allow or None, **asked}
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(tensors[0].dtype)
    if name is not None and not getattr(switches, f"allow_{name}_reduced_precision_reduction"):
        options["target"] = _in_float32(target)
    try:
        return verb(*tensors, **options, strict=True)
    except ArgumentError as refusal:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanUnknownWarning)
            raise Guess(str(refusal).split(";")[0], verb(*tensors, **options)) from None


@cache
def _in_float32(target: str) -> Target:
    """Return a target that adds partial sums of 16-bit products in float32."""
    return get_target(target).with_settings(reductions="fp32")


def _mm(target: str, a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None) -> torch.Tensor:
    return _known_product(mm, a, b, target=target, out_dtype=out_dtype)


def _addmm(
    target: str, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, *, beta: float = 1,
    alpha: float = 1,
) -> Any:  # fmt: skip
    """Return addmm: a vector is added by the library's epilogue, a matrix to the float32 sums before they are rounded.

    In 16 bits the kernels of Hopper (``wgmma``, K in one part) round the sums before they add a matrix: an H100 has
    these bits for [512, 64] with K of 16, and for [123, 31] with K of 16, which another kernel computes.

    Raises:
        Guess: As ``_known_product``, and of a matrix that is not zero.
    """
    dtype = out_dtype or a.dtype
    if beta != 1 or alpha != 1 or a.dtype == torch.float64:
        raise UnknownOrder("addmm with factors, or of float64")
    if c.shape == b.shape[1:] and dtype == a.dtype:
        return _known_product(linear, a, b.t(), c, target=target)
    if c.shape != (a.shape[0], b.shape[1]):
        raise UnknownOrder("addmm of a row or column, or of a vector to another dtype")
    # the sums in float32, by the plan of a product in the result's dtype
    with seen_calls() as calls, suppress(Guess):
        _known_product(mm, a, b, target=target, out_dtype=dtype)
    plan = next((spec.plan for spec in calls.values()), None)
    reason = "addmm of a matrix, for which the library may choose another order than for mm" if c.any() else ""
    try:
        sums = _known_product(mm, a, b, target=target, out_dtype=torch.float32, plan=plan)
    except Guess as guess:
        reason, sums = guess.args
    rounds_first = plan is not None and plan.split == 1 and plan.instruction_k is None
    result = ((sums.to(dtype).float() if rounds_first else sums) + c.float()).to(dtype)
    if reason:
        raise Guess(reason, result)
    return result


def _grouped_mm(
    target: str, a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Return _grouped_mm: in bfloat16 a chain of wgmma steps for each group, else a product of the library for each.

    Raises:
        Guess: The plan of a group's product is one.
    """
    if offs is None or bias is not None or out_dtype not in (None, a.dtype):
        raise UnknownOrder("_grouped_mm without offsets, with a bias, or of another dtype than its operands")
    guesses = []

    def product(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        if p.numel() == 0 or q.numel() == 0:
            return torch.zeros(p.shape[0], q.shape[1], dtype=p.dtype)
        if p.dtype == torch.bfloat16:
            return arrays.product(p, q.mT, arrays.chain_spec("hopper.wgmma", p.dtype), dtype=p.dtype)
        try:
            return _known_product(mm, p, q, target=target)
        except Guess as guess:
            guesses.append(guess.args[0])
            return guess.args[1]  # type: ignore[no-any-return]

    ends = [0, *offs.tolist()]
    arrays.check_shapes("_grouped_mm", b=(b, (*b.shape[:-2], a.shape[-1], b.shape[-1])))
    if ends[-1] != a.shape[0 if b.ndim == 3 else 1]:
        raise UnknownOrder("_grouped_mm of groups that leave a part out, which a GPU does not write")
    groups = list(zip(ends, ends[1:], strict=False))
    if b.ndim == 3:
        result = torch.cat([product(a[i:j], b[n]) for n, (i, j) in enumerate(groups)])
    else:
        result = torch.stack([product(a[:, i:j], b[i:j]) for i, j in groups])
    if guesses:
        raise Guess(guesses[0], result)
    return result


DRAWS = _packets(random.OPERATORS)
"""Operators that draw random numbers: their first argument is the GPU's generator."""

PRODUCTS: dict[Any, Callable] = {
    _ATEN.mm: _mm,
    _ATEN.bmm: lambda target, a, b: _known_product(bmm, a, b, target=target),
    _ATEN.addmm: _addmm,
    _ATEN._grouped_mm: _grouped_mm,
}

COMPOSED = frozenset(packet for packet in KNOWN if "_scaled_dot_product" in packet.__name__) | _COMPOSITE
"""Operators that may come to others, which the simulation then gets: it is their first argument."""

Evidence = Literal["recorded", "reasoned"]
EVIDENCE: dict[Any, Evidence] = {
    **dict.fromkeys(SAME, "reasoned"),
    **dict.fromkeys([*PRODUCTS, *DRAWS, *KNOWN], "recorded"),
}
"""What stands behind an operator's bits: calls recorded on a GPU, or that it has no order of operations. Shapes that no
recording covers raise ``BySource``."""
