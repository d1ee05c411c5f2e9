# SPDX-License-Identifier: Apache-2.0
"""Calibration: ask a GPU which arithmetic its matrix unit has, and in which order its library adds."""

from fmtsim.gemm.model_layers import list_models, read_shapes
from tools.calibrate.campaign import Finding, calibrate
from tools.calibrate.gpu import GPU, TorchGPU, open_gpu
from tools.calibrate.layers import model_calls
from tools.calibrate.planfile import plan_file

__all__ = [
    "GPU", "Finding", "TorchGPU", "calibrate", "list_models", "model_calls", "open_gpu", "plan_file", "read_shapes",
]  # fmt: skip
