# SPDX-License-Identifier: Apache-2.0
"""Operands of native calls, and the GPU that they are made for."""

import torch

F8, F5, F4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H200 = "NVIDIA H200 (132 multiprocessors), torch 2.11.0+cu130, cuBLASLt 13.1.0"


def matrix(rows, columns, dtype=F8, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ones(*shape):
    return torch.ones(shape)
