# SPDX-License-Identifier: Apache-2.0
"""What the server of forked processes imports: kernels are compiled here once, for all of them."""

import torch._dynamo  # noqa: F401  # which DistributedDataParallel imports
import torch.distributed.fsdp  # noqa: F401

from tests.support.reductions import warm

warm()
