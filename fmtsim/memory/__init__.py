# SPDX-License-Identifier: Apache-2.0
"""What training or serving a model needs of memory on real devices, by arithmetic, before it runs."""

from fmtsim.memory.bits import bits_per_element
from fmtsim.memory.estimate import MemoryEstimate, MemoryLine, SavedTensor
from fmtsim.memory.lookup import model_size
from fmtsim.memory.serving import serving_memory
from fmtsim.memory.sizes import Latent, ModelSize
from fmtsim.memory.training import training_memory

__all__ = [
    "Latent", "MemoryEstimate", "MemoryLine", "ModelSize", "SavedTensor", "bits_per_element", "model_size",
    "serving_memory", "training_memory",
]  # fmt: skip
