"""Random numbers of a layer: where they come from, and a stream of its own for every use."""

import torch

from fmtsim.spec.cast import RandomKey

Generator = int | torch.Generator | None
Stream = Generator | RandomKey
FORWARD = ("x_f", "w_f")  # operands of the forward pass
SIGNS = 18  # the use that signs of rotations are, and one more backwards
_MASK64 = (1 << 64) - 1


def stream_of(generator: Generator, index: int) -> Generator:
    """Return the generator itself, or a seed of its own for each use in a call with an int seed.

    Uses 0 to 5 are the operands, 6 to 8 units that round stochastically, 9 to 11 outputs, 12 to 17 the scales of the
    operands, 18 and 19 the signs of rotations forward and backward.
    """
    if not isinstance(generator, int):
        return generator
    z = (generator + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64  # splitmix64: near seeds give unrelated keys
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1
