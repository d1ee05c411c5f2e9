"""The verbs of matrix products, the resolver of a call, the operator, and the exact oracle."""
