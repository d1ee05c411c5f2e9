"""How matrices are multiplied: which operand is quantised how, and the product itself."""
