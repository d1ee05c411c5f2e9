# SPDX-License-Identifier: Apache-2.0
"""What training or serving a model needs of memory on real devices, by arithmetic, before it runs."""

from fmtsim.lab.memory.estimate import MemoryEstimate, MemoryLine, Parallel, SavedTensor, bits_per_element
from fmtsim.lab.memory.serving import serving_memory
from fmtsim.lab.memory.sizes import Latent, ModelSize, model_size
from fmtsim.lab.memory.training import Lora, StoredFormats, training_memory

__all__ = [
    "Latent", "Lora", "MemoryEstimate", "MemoryLine", "ModelSize", "Parallel", "SavedTensor", "StoredFormats",
    "bits_per_element", "model_size", "serving_memory", "training_memory",
]  # fmt: skip
