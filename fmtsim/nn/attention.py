"""MultiheadAttention whose projections are emulated; scores, softmax and weighted sums stay in high precision."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.errors import ArgumentError
from fmtsim.nn.modules import EmulatedModule, register_emulated


class EmulatedMultiheadAttention(EmulatedModule, nn.MultiheadAttention):
    """Apply multi-head attention with quantised in- and out-projections.

    Where query, key and value are one tensor the in-projection is one product with the packed weight, where key and
    value are one tensor they share one, else there are three. Arguments, masks and results are those of
    ``torch.nn.MultiheadAttention``; its fused inference kernel is never taken, because that would skip the emulation.
    """

    original_class = nn.MultiheadAttention
    parts = ("in_proj", "q_proj", "k_proj", "v_proj", "kv_proj", "out_proj")

    @staticmethod
    def matrices(module: nn.MultiheadAttention) -> Iterator[tuple[int, int]]:
        """Yield the size of one projection from each width of input."""
        for inputs in sorted({module.embed_dim, module.kdim, module.vdim}):
            yield module.embed_dim, inputs

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output and, if asked for, the weights, shaped as in torch.nn.MultiheadAttention."""
        _check(self, query, key, value, attn_mask, is_causal)
        same_qk, same_kv = query is key, key is value
        batched = query.dim() == 3
        arrange = _to_time_first if self.batch_first and batched else _with_batch if not batched else _unchanged
        query = arrange(query)
        key = query if same_qk else arrange(key)
        value = key if same_kv else arrange(value)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._project(query, key, value)
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _additive(attn_mask, query.dtype)
        padding = _additive(key_padding_mask, query.dtype)
        k, v, mask, padding = self._extended(k, v, mask, padding)
        heads, weights = self._attend(q, k, v, _merged(mask, padding, self.num_heads), causal, need_weights)
        out = self.gemm(heads, self.out_proj.weight, self.out_proj.bias, "out_proj")
        out = out.transpose(0, 1) if self.batch_first and batched else out if batched else out.squeeze(1)
        if weights is not None:
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return out, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each ``[length, batch, embed_dim]``."""
        size, bias = self.embed_dim, self.in_proj_bias
        if not self.kdim == self.vdim == size:  # three weights instead of a packed one
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            inputs = ((query, self.q_proj_weight), (key, self.k_proj_weight), (value, self.v_proj_weight))
            q, k, v = (self.gemm(x, w, b, f"{n}_proj") for n, (x, w), b in zip("qkv", inputs, biases, strict=True))
            return q, k, v
        if query is key and key is value:
            q, k, v = self.gemm(query, self.in_proj_weight, bias, "in_proj").chunk(3, -1)
            return q, k, v
        first, rest = (None, None) if bias is None else (bias[:size], bias[size:])
        q = self.gemm(query, self.in_proj_weight[:size], first, "q_proj")
        if key is value:
            k, v = self.gemm(key, self.in_proj_weight[size:], rest, "kv_proj").chunk(2, -1)
            return q, k, v
        b_k, b_v = (None, None) if rest is None else rest.chunk(2)
        k = self.gemm(key, self.in_proj_weight[size : 2 * size], b_k, "k_proj")
        return q, k, self.gemm(value, self.in_proj_weight[2 * size :], b_v, "v_proj")

    def _extended(
        self, k: Tensor, v: Tensor, mask: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Append the learned and the zero key and value that the module may have, open to every query."""
        batch, extra = k.shape[1], 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(1, batch, -1)])
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(1, batch, -1)])
            extra += 1
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 0, 0, 1)) for t in (k, v))
            extra += 1
        if extra:
            mask, padding = (None if t is None else F.pad(t, (0, extra)) for t in (mask, padding))
        return k, v, mask, padding

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the heads side by side ``[L, batch, embed_dim]``, and the weights ``[batch, heads, L, S]``."""
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        if mask is not None and mask.dim() == 3:  # one mask a batch entry and head
            mask = mask.unflatten(0, (-1, self.num_heads))
        if not need_weights:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
            return heads.permute(2, 0, 1, 3).flatten(2), None
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        weights = F.dropout(F.softmax(scores if mask is None else scores + mask, dim=-1), p=dropout)
        return (weights @ v).permute(2, 0, 1, 3).flatten(2), weights


register_emulated(EmulatedMultiheadAttention)


def _unchanged(t: Tensor) -> Tensor:
    return t


def _to_time_first(t: Tensor) -> Tensor:
    return t.transpose(0, 1)


def _with_batch(t: Tensor) -> Tensor:
    return t.unsqueeze(1)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask that is added to the scores; True in a boolean mask means: not allowed."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _merged(mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor | None:
    """Merge ``[L, S]`` or ``[batch * heads, L, S]`` with ``[batch, S]`` into a mask that broadcasts over all heads."""
    if padding is None:
        return mask
    rows = padding[:, None, :].repeat_interleave(heads, 0)
    return rows if mask is None else mask + rows


def _check(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> None:
    if query.is_nested or key.is_nested or value.is_nested:
        raise ArgumentError(
            "an emulated MultiheadAttention takes no nested tensors; pass padded tensors with key_padding_mask"
        )
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        raise ArgumentError(
            f"MultiheadAttention: query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions; "
            "all need 3, or 2 without a batch"
        )
    sizes = (query.shape[-1], key.shape[-1], value.shape[-1])
    if sizes != (module.embed_dim, module.kdim, module.vdim):
        raise ArgumentError(
            f"MultiheadAttention: query, key and value have {sizes} features; "
            f"expected {(module.embed_dim, module.kdim, module.vdim)}"
        )
    if is_causal and attn_mask is None:
        raise ArgumentError("MultiheadAttention: is_causal=True is a hint about attn_mask; pass attn_mask too")
