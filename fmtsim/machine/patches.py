# SPDX-License-Identifier: Apache-2.0
"""What ``simulate`` changes in torch: functions for which a GPU has one kernel and a CPU several, and autocast.

Forks are kernels of the dispatcher at a key that no device has here. A thread that simulates includes the key, so that
other threads do not see them. Functions of Python, which no dispatcher calls, ask which thread runs.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import _ops
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fmtsim.machine.ptx.forks import forks, on_gpu
from fmtsim.machine.unknown import UnknownOrder
from fmtsim.support.errors import ArgumentError

LOWER = """
_convolution convolution cudnn_convolution cudnn_convolution_transpose addmv addr mv einsum chain_matmul
linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention
"""
"""Operators that run in autocast's dtype."""
FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity dist pdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
"""Operators that run in float32."""
TO_FLOAT32 = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
"""
"""Operators that return float32, by their argument dtype, unless they get one."""
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
"""Operators that run in the widest dtype among their arguments, autocast's at least."""
_REFUSED = "binary_cross_entropy"
_KEY: Any = torch._C.DispatchKey.AutocastIPU  # type: ignore[attr-defined]
_AUTOCAST = torch._C.DispatchKey.AutocastCPU  # asked behind the key of forks
_BELOW = torch._C._dispatch_keyset_full_after(_AUTOCAST)
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
# A backend of no device here, for operators whose gradients torch has for devices with a kernel of them alone.
_GPU: Any = torch._C.DispatchKey.IPU  # type: ignore[attr-defined]
_ON_GPU = torch._C.DispatchKeySet(_GPU) - torch._C.DispatchKeySet(torch._C.DispatchKey.Dense)  # type: ignore[attr-defined]


def _is_cast(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _to(dtype: torch.dtype, *arguments: Any) -> Any:
    return tree_map(lambda x: x.to(dtype) if _is_cast(x) else x, arguments)


def _in(choose: Callable[[torch.dtype, set[torch.dtype]], torch.dtype]) -> Callable:
    """Return a policy that runs an operator in the dtype chosen of autocast's and of its arguments'."""

    def run(operator: Callable, args: Any, kwargs: Any) -> Any:
        dtypes = {x.dtype for x in tree_leaves((args, kwargs)) if _is_cast(x)}
        args, kwargs = _to(choose(torch.get_autocast_dtype("cpu"), dtypes), args, kwargs)
        return operator(*args, **kwargs)

    return run


def _to_float32(operator: Callable, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in operator._schema.arguments]  # type: ignore[attr-defined]
    if not _is_cast(args[0]):
        return operator(*args, **kwargs)
    if "dtype" not in names:  # norm has another overload with one
        norm = getattr(torch.ops.aten.norm, f"{operator._overloadname}_dtype")  # type: ignore[attr-defined]
        return norm(args[0], *args[1:] or (2,), **{"dtype": torch.float32} | kwargs)
    place = names.index("dtype")
    if len(args) > place:
        args = (*args[:place], torch.float32 if args[place] is None else args[place], *args[place + 1 :])
    elif kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}
    return operator(*args, **kwargs)


def _refuse(operator: Callable, args: Any, kwargs: Any) -> Any:
    raise ArgumentError(
        "binary_cross_entropy is not computed under autocast on a GPU; use binary_cross_entropy_with_logits, or leave "
        "autocast for it"
    )


POLICIES = {
    _in(lambda lower, _: lower): LOWER, _in(lambda *_: torch.float32): FLOAT32, _to_float32: TO_FLOAT32,
    _in(lambda lower, dtypes: lower if dtypes <= {lower} else torch.float32): WIDEST, _refuse: _REFUSED,
}  # fmt: skip
SHARED = """
_convolution.deprecated addbmm addmm baddbmm binary_cross_entropy_with_logits bmm cdist conv1d conv2d conv3d conv_tbc
conv_transpose1d conv_transpose2d.input conv_transpose3d.input cosine_embedding_loss hinge_embedding_loss huber_loss
kl_div l1_loss linalg_vecdot linear margin_ranking_loss matmul mm mse_loss multi_margin_loss multilabel_margin_loss
nll_loss nll_loss2d poisson_nll_loss prelu scaled_dot_product_attention smooth_l1_loss soft_margin_loss
triplet_margin_loss
"""
"""Operators that both autocasts treat alike."""


def kernels(device: str) -> set[str]:
    """Return the operators of ATen for which autocast has a kernel on a device, ``"CPU"`` or ``"CUDA"``."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return {name[6:] for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{device}")}


def _autocasts() -> bool:
    """Return True where autocast is on."""
    return not _is_excluded(_AUTOCAST)


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST))


def _cast(name: str, policy: Callable) -> Callable:
    """Return a fork that does to an operator's arguments what a GPU's autocast does."""
    operator = _overload(name)

    def call(host: Callable, *args: Any, **kwargs: Any) -> Any:
        if not _autocasts():
            return host(*args, **kwargs)
        with _without_autocast():
            return policy(operator, args, kwargs)

    return call


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(fork: Callable, operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a fork with the host's own function in front, which goes on below the key and below autocast."""
    return fork(partial(operator.redispatch, keys & _BELOW), *args, **kwargs)


@cache
def _register() -> tuple[torch.library.Library, ...]:
    """Put the forks' kernels at their key, for good: threads that do not include it are not touched."""
    policies = {name: policy for policy, names in POLICIES.items() for name in names.split()}
    # 1. A CPU's autocast has kernels that a GPU's has not: they are passed over.
    others = kernels("CPU") - set(policies) - set(SHARED.split())
    table: dict[str, Callable] = dict.fromkeys(others, lambda host, *args, **kwargs: host(*args, **kwargs))
    table |= {name: _cast(name, policy) for name, policy in policies.items()} | _OPERATORS
    for packet in _RECURRENT:
        table |= {name: partial(_recurrent, packet) for name in _overloads(packet)}
    # 2. Operators without a fork have no kernel at the key, higher-order operators of now and later among them.
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
    for operator in _ops._higher_order_ops.values():
        operator.fallthrough(_KEY)
    fallback, forks_of_aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, _KEY.name)
    for name, fork in table.items():
        forks_of_aten.impl(name, partial(_kernel, fork, _overload(name)), _KEY.name, with_keyset=True)
    # 3. rms_norm as on a GPU: one operator with gradients of its own. The host makes it of others, which have theirs.
    fused = _overload("_fused_rms_norm")
    forks_of_aten.impl("_fused_rms_norm", fused.decompose, _GPU.name)
    forks_of_aten.impl("_fused_rms_norm", partial(_fused_rms_norm, fused), _KEY.name, with_keyset=True)
    forks_of_aten.impl("_fused_rms_norm_backward", _host_rms_norm_backward, "CPU")
    return fallback, forks_of_aten


def _overloads(packet: str) -> list[str]:
    return [packet if x == "default" else f"{packet}.{x}" for x in getattr(torch.ops.aten, packet).overloads()]


_OPTIMIZERS = sys.modules[torch.optim.Optimizer.__module__]
_thread = threading.local()  # its ``run`` is the simulation that a thread is in


def _dropout(host: Callable, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Return dropout by one operator, as on a GPU; on a CPU torch takes three."""
    return torch.native_dropout(x, p, True)[0] if train and 0 < p < 1 and x.numel() else host(x, p, train)


def _rms_norm(
    host: Callable, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Return rms_norm by one operator, as on a GPU; torch's operators remain for mixed dtypes and a nested x."""
    if x.is_nested or (weight is not None and weight.dtype != x.dtype):
        return host(x, shape, weight, eps)  # type: ignore[no-any-return]
    return torch.ops.aten._fused_rms_norm(x, list(shape), weight, eps)[0]


def _fused_rms_norm(operator: Any, keys: Any, *args: Any) -> Any:
    """Call the operator with its own gradients, which torch has for devices with a kernel of it alone."""
    return operator.redispatch(keys & _BELOW | _ON_GPU, *args)


def _host_rms_norm_backward(
    g: torch.Tensor, x: torch.Tensor, shape: list[int], rstd: torch.Tensor, weight: torch.Tensor | None, mask: Any
) -> Any:
    """Return the gradients of (x, weight) in the host's order of sums."""
    dims = list(range(-len(shape), 0))
    g_wide = g.to(rstd.dtype)
    weighted, normal = g_wide if weight is None else g_wide * weight, x * rstd
    dx = (weighted - normal * (weighted * normal).mean(dims, keepdim=True)) * rstd
    return dx.to(x.dtype), (g_wide * normal).reshape(-1, *shape).sum(0).to(x.dtype)


def _softmax(operator: Callable) -> Callable:
    """Return softmax of float16 in float32 by one operator, as on a GPU; on a CPU torch converts first."""

    def call(host: Callable, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = torch.float32 if dtype is None and _is_cast(x) and _autocasts() else dtype
        if x.dtype == torch.float16 and dtype == torch.float32:
            return operator(x, dim, True)  # type: ignore[no-any-return]
        return host(x, dim, dtype)  # type: ignore[no-any-return]

    return call


def _takes_efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float, causal: bool,
    grouped: bool,
) -> bool:  # fmt: skip
    """Return True if a GPU takes the memory-efficient kernel where the host has no operator like it.

    PyTorch on an H200 asks cuDNN first, which takes no mask with a gradient, then FlashAttention-2, which takes no
    mask, then this kernel; in float32 this kernel alone, for which the host's fused operator stands.
    """
    backends = torch.backends.cuda
    flash, cudnn = backends.flash_sdp_enabled(), backends.cudnn_sdp_enabled()
    others = flash if q.dtype == torch.float32 else cudnn or (flash and mask is None)
    gradient = mask is not None and mask.requires_grad
    if not backends.mem_efficient_sdp_enabled() or (others and not gradient):
        return False
    tensors = [q, k, v] if mask is None else [q, k, v, mask]
    return (
        q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(x.dtype == q.dtype or (x is mask and x.dtype == torch.bool) for x in tensors)
        and all(x.stride(-1) == 1 for x in tensors)
        and (q.ndim, q.shape[:2], q.shape[-1]) == (4, k.shape[:2], v.shape[-1])
        and q.shape[-1] * q.element_size() % 16 == 0
        and not (dropout or grouped or (causal and mask is not None))
        and not torch.are_deterministic_algorithms_enabled()
    )


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose rows begin at multiples of 8 elements, as PyTorch gives it to the kernel."""
    if all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    keys = mask.shape[-1]
    return functional.pad(mask, (0, 8 - keys % 8))[..., :keys]


def _attention(
    host: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return attention; unknown where the host takes the math path and a GPU one kernel that is not known.

    PyTorch 2.11 gives cuDNN a boolean mask as a bias of -65504: a row that is masked whole attends to every key.
    A mask that takes a gradient goes to the memory-efficient kernel.
    """
    from fmtsim.machine import attention  # with numba, which takes a second

    if _autocasts():
        query, key, value, attn_mask = _to(torch.get_autocast_dtype("cpu"), query, key, value, attn_mask)
    backends = torch.backends.cuda
    kernels = backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.cudnn_sdp_enabled
    if _takes_efficient(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, -torch.inf).to(query.dtype)
        bias = None if bias is None else _aligned(bias).expand(*query.shape[:3], key.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0]
    learned = None if attn_mask is None or not attn_mask.requires_grad else attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool and query.element_size() == 2 and query.ndim == 4:
        attn_mask = torch.where(attn_mask, 0.0, -65504.0).to(query.dtype)
    differs = query.shape[-1] != value.shape[-1]  # the host takes the math path, and has no operator for cuDNN's
    if (
        differs
        and attn_mask is None
        and not dropout_p
        and kernels[2]()
        and attention.knows(query, key, value, is_causal)
    ):
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        return cudnn(query, key, value, None, True, 0.0, is_causal, False, scale=scale)[0]
    reasons = {
        "dropout": dropout_p > 0,
        "values of another head size": differs,
        "a mask that takes a gradient": learned is not None and learned.stride(-1) == 1,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None and query.ndim == 4 and any(enabled() for enabled in kernels):
        _thread.run._note("scaled_dot_product_attention", UnknownOrder(f"attention with {reason}"))
    with _without_autocast():  # of the math path's operators
        return host(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]


def _recurrent(name: str, host: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return a recurrent network's results by the host, for which a GPU has a kernel of its own."""
    _thread.run._note(name, UnknownOrder("a recurrent network by a GPU's own kernel"))
    return host(*args, **kwargs)


_OPERATORS: dict[str, Callable] = {
    "dropout": _dropout, "rms_norm": _rms_norm, "scaled_dot_product_attention": _attention,
    **{f"{name}.int": _softmax(getattr(torch.ops.aten, f"_{name}")) for name in ("softmax", "log_softmax")},
}  # fmt: skip
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")


def _running() -> bool:
    """Return True in a thread that is in a simulation."""
    return getattr(_thread, "run", None) is not None


@contextmanager
def outside() -> Iterator[None]:
    """Give this thread the host's functions again, for what traces them."""
    run, _thread.run = getattr(_thread, "run", None), None
    try:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            yield
    finally:
        _thread.run = run


def _fork(host: Callable, gpu: Callable) -> Callable:
    """Return a function that calls ``gpu`` in a thread that simulates, and elsewhere the host's own."""
    return lambda *args, **kwargs: (gpu if _running() else host)(*args, **kwargs)


_FACTORIES = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)


def draws_on_host() -> bool:
    """Return True while a function makes random numbers without a device: on a GPU, too, the CPU draws them."""
    return getattr(_thread, "host_draws", False)


class _Functions(TorchFunctionMode):
    """Take functions of torch that ask for a device, or draw without one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or what stands for it."""
        if func is torch.Tensor.backward:  # which runs a library's code: this mode stays on in it
            names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "inputs")
            named = {"grad_tensors" if name == "gradient" else name: value for name, value in (kwargs or {}).items()}
            with self:
                return torch.autograd.backward(**dict(zip(names, args, strict=False)), **named)
        kwargs = kwargs or {}
        on_host = func in _FACTORIES and kwargs.get("device") is None and not any(map(torch.is_tensor, args))
        on_host = on_host and torch.get_default_device().type == "cpu"
        func, args, kwargs = on_gpu(func, args, kwargs, sys._getframe(1))
        _thread.host_draws = on_host
        try:
            return func(*args, **kwargs)
        finally:
            _thread.host_draws = False


def _functions() -> Iterator[tuple[Any, str, Callable]]:
    """Yield functions of Python that a simulation replaces: owner, name, and what gets the host's own first."""
    yield _OPTIMIZERS, "_get_foreach_kernels_supported_devices", lambda host: [*host(), "cpu"]

    def start(host: Callable, self: Any, device_type: str, dtype: Any = None, *options: Any, **named: Any) -> None:
        dtype = dtype or torch.get_autocast_dtype("cuda") if device_type == "cuda" else dtype
        host(self, "cpu" if device_type == "cuda" else device_type, dtype, *options, **named)

    yield torch.autocast, "__init__", start
    yield (
        torch.amp.GradScaler,
        "__init__",
        lambda host, self, device="cuda", *options, **named: host(
            self, "cpu" if device == "cuda" else device, *options, **named
        ),
    )
    yield from forks(lambda: _thread.run)


_lock, _simulations, _undo = threading.Lock(), list[Any](), ExitStack()


@contextmanager
def patched(run: Any) -> Iterator[None]:
    """Give this thread torch as a simulation needs it.

    Kernels of the dispatcher are this thread's, by their key. Functions of Python are replaced in the process, from the
    first simulation that is entered in any thread to the last that is left, and a lock counts them: they ask whether
    their thread simulates, and are the host's own elsewhere.
    """
    with _lock, ExitStack() as stack:
        _register()
        if not _simulations:
            for owner, name, gpu in _functions():
                known: Any = inspect.getattr_static(owner, name, None)  # a torch without CUDA lacks some
                own: Any = known.fget if isinstance(known, property) else known
                both: Any = _fork(own, partial(gpu, own))
                both = property(both) if own is not known else both
                stack.enter_context(mock.patch.object(owner, name, both, create=known is None))
            _undo.push(stack.pop_all())
        _simulations.append(run)
    outer, _thread.run = getattr(_thread, "run", None), run  # a kernel of the math path enters again
    excluded = _is_excluded(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY), _Functions():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, excluded)
        _thread.run = outer
        with _lock:
            _simulations.remove(run)
            if not _simulations:
                _undo.close()
