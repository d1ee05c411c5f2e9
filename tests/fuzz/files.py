"""Targets that read strings and files: formats, recipes, plans, tensors on disk, command lines."""

from hypothesis import strategies as st

from fmtsim.formats.registry import get_format
from tests.fuzz.target import Target

NAMES = st.text() | st.from_regex(r"(e\d+m\d+|u?int\d+(_(full|half))?(_f\d+)?|lns\d+_g\d+|logfmt\d+)", fullmatch=True)

TARGETS: list[Target] = [Target("format.name", NAMES, get_format)]
