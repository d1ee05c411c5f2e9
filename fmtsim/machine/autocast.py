# SPDX-License-Identifier: Apache-2.0
"""torch.autocast inside ``simulate``: a CPU's autocast with the operators that PyTorch's autocast has on a GPU.

The lists are those of PyTorch 2.11 (aten/src/ATen/autocast_mode.h). An operator that a CPU's autocast treats as a GPU's
does keeps torch's own kernel, with its cache of weights that were cast.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

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
_KEY = torch._C.DispatchKey.AutocastCPU


def _is_cast(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _to(dtype: torch.dtype, *arguments: Any) -> Any:
    return tree_map(lambda x: x.to(dtype) if _is_cast(x) else x, arguments)


def to_lower(*arguments: Any) -> Any:
    """Return arguments, their floating-point tensors but float64's in autocast's dtype."""
    return _to(torch.get_autocast_dtype("cpu"), *arguments)


def _lower(operator: Callable, args: Any, kwargs: Any) -> Any:
    args, kwargs = to_lower(args, kwargs)
    return operator(*args, **kwargs)


def _float32(operator: Callable, args: Any, kwargs: Any) -> Any:
    args, kwargs = _to(torch.float32, args, kwargs)
    return operator(*args, **kwargs)


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


def _widest(operator: Callable, args: Any, kwargs: Any) -> Any:
    lower = torch.get_autocast_dtype("cpu")
    dtypes = {x.dtype for x in tree_leaves((args, kwargs)) if _is_cast(x)}
    args, kwargs = _to(lower if dtypes <= {lower} else torch.float32, args, kwargs)
    return operator(*args, **kwargs)


def _refuse(operator: Callable, args: Any, kwargs: Any) -> Any:
    raise ArgumentError(
        "binary_cross_entropy is not computed under autocast on a GPU; use binary_cross_entropy_with_logits, or leave "
        "autocast for it"
    )


POLICIES = {_lower: LOWER, _float32: FLOAT32, _to_float32: TO_FLOAT32, _widest: WIDEST, _refuse: _REFUSED}
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


def _kernel(name: str, policy: Callable) -> Callable:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return policy(operator, args, kwargs)

    return kernel


def registered(kernels_by_name: dict[str, Any], key: str) -> torch.library.Library:
    """Put kernels in the place of ATen's at a dispatch key, until the library is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of kernels that are put in the place of others
        for name, kernel in kernels_by_name.items():
            library.impl(name, kernel, key)
    return library


def _lists() -> dict[str, Any]:
    """Return the kernels that make a CPU's autocast a GPU's."""
    policies = {name: policy for policy, names in POLICIES.items() for name in names.split()}
    plain = dict.fromkeys(kernels("CPU") - set(policies) - set(SHARED.split()), torch.library.fallthrough_kernel)
    return plain | {name: _kernel(name, policy) for name, policy in policies.items()}


@contextmanager
def gpu_autocast(simulates: Callable[[], bool]) -> Iterator[None]:
    """Give ``torch.autocast`` and ``GradScaler`` for ``"cuda"`` and ``"cpu"`` what they do on a GPU.

    Args:
        simulates: Returns True in a thread whose autocast it is; in others it does what it did.
    """
    libraries: list[torch.library.Library] = []
    autocast, scaler = torch.autocast.__init__, torch.amp.GradScaler.__init__

    def start(self: Any, device_type: str, dtype: Any = None, *options: Any, **named: Any) -> None:
        if device_type == "cuda" and simulates():
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        if not libraries and simulates():
            libraries.append(registered(_lists(), "AutocastCPU"))
        autocast(self, device_type, dtype, *options, **named)

    def start_scaler(self: Any, device: str = "cuda", *options: Any, **named: Any) -> None:
        scaler(self, "cpu" if device == "cuda" and simulates() else device, *options, **named)

    with (
        mock.patch.object(torch.autocast, "__init__", start),
        mock.patch.object(torch.amp.GradScaler, "__init__", start_scaler),
    ):
        try:
            yield
        finally:
            for library in libraries:
                library._destroy()
