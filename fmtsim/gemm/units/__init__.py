"""The catalogue of matrix units: what each adds, in which order, and the evidence."""
