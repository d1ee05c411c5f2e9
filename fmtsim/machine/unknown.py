# SPDX-License-Identifier: Apache-2.0
"""What an operator raises whose arithmetic on the GPU is not known or not recorded, or has no bits to reproduce."""


class UnknownOrder(Exception):
    """The GPU's order of operations is not known for this call; the message says what of it."""


class Nondeterministic(Exception):
    """The GPU's own results differ from run to run (atomics, locks): what of them, and perhaps one possible result."""


class Guess(Exception):
    """An order that is not certain: what of it, and the result by the best guess."""


class BySource(Exception):
    """An order that was read in the vendor's or PyTorch's source and that no recording confirms: what, the result."""
