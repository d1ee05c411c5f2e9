# SPDX-License-Identifier: Apache-2.0
"""What PTX instructions compute, one row each: an opcode with every modifier and type, semantics, section of the ISA.

An opcode that no row spells is refused: a modifier or a type that is not known is never taken for another. Rows are
instructions of one thread, from registers to registers; ``block`` has memory, control and what threads do together.

Source: PTX ISA 8.7, chapter 9.7; what the approximations are made of was read from SASS and compared with an H100
(``tests/machine/ptx/test_instructions.py``).
"""

from collections.abc import Callable
from typing import Any

from fmtsim.machine.ptx import conversion_instructions, float_instructions, half_instructions, integer_instructions  # noqa: F401, their rows
from fmtsim.machine.ptx.float_instructions import quotient_factors, reciprocal_factors
from fmtsim.machine.ptx.gpu_numbers import encode, f16_to_f32, finish, flush, flush_tiny, saturate
from fmtsim.machine.ptx.instruction_table import TABLE, Opcode, Row
from fmtsim.machine.ptx.values import Vector

# Products that ptxas fuses into sums (``contract``)


def fused_factors(opcode: Opcode, row: Row) -> Callable[..., Any]:
    """Return the semantics of a product that also yields the two factors of its last multiplication."""

    def traced(*operands: Vector) -> tuple[Vector, ...]:
        factors: tuple[Vector, ...]
        if opcode[0] == "div":
            factors = quotient_factors(opcode, *operands)
        elif opcode[0] == "rcp":
            factors = reciprocal_factors(opcode, operands[0])
        else:
            factors = operands
            if opcode[-1] == "f32" and "ftz" in opcode:
                factors = tuple(flush(x) for x in operands)
        return row.semantics(*operands), *factors

    return traced


def fused_sum(opcode: Opcode, negates_product: bool, negates_addend: bool) -> Callable[..., Any]:
    """Return the semantics of an addition with a product in one rounding, of the factors and the other operand."""
    fma = ("fma", "rn", *(part for part in opcode[1:] if part != "rn"))

    def traced(x: Vector, y: Vector, z: Vector) -> Vector:
        x = _negated(x, opcode) if negates_product else x
        z = _negated(z, opcode) if negates_addend else z
        return TABLE[".".join(fma)].semantics(x, y, z)

    return traced


def scaled_product(opcode: Opcode, scale: float) -> Callable[[Vector, Vector], Vector]:
    """Return the semantics of a float32 product times 2^k in one rounding, of its factors."""

    def traced(x: Vector, y: Vector) -> Vector:
        wide = x.to("f64") * y.to("f64") * scale  # exact
        return finish(flush_tiny(wide.to("f32"), wide) if "ftz" in opcode else wide.to("f32"), opcode)

    return traced


def _negated(x: Vector, opcode: Opcode) -> Vector:
    if x.kind[0] == "f":
        return -x
    return x ^ (0x80008000 if opcode[-1].endswith("x2") else 0x8000)


# What ptxas writes otherwise than the PTX says

SIGN_ONLY: dict[str, Callable[[Vector], Vector]] = {  # of NaN, too
    "neg": lambda x: -x,
    "abs": lambda x: (x.view("u32") & 0x7FFFFFFF).view("f32"),
}


def with_operand(semantics: Callable) -> Callable[..., tuple[Vector, Vector]]:
    """Return semantics that also yield the first operand."""
    return lambda x, *others: (semantics(x, *others), x)


def clamped(opcode: Opcode) -> Callable[[Vector], Vector]:
    """Return max(min(x, 1), 0), which ptxas makes the .sat of x: of NaN it is 0."""

    def traced(x: Vector) -> Vector:
        if opcode[-1] != "f16":
            return saturate(flush(x) if "ftz" in opcode else x)
        value = f16_to_f32(x, flushes="ftz" in opcode)
        return encode(saturate(value).to("f64"), "f16", "rn").to("u16")

    return traced
