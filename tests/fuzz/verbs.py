"""Targets that take tensors: verbs, products, converted layers."""

from tests.fuzz.target import Target

TARGETS: list[Target] = []
