"""What engines export is the protocol, and no more."""

import importlib

import pytest

from fmtsim.spec import engine


def names(protocol):
    """Names of a protocol's methods and attributes, inherited ones too."""
    own = [vars(cls) for cls in protocol.__mro__ if cls.__module__ == engine.__name__]
    found = {name for members in own for name in (*members, *members.get("__annotations__", ()))}
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize(
    ("name", "protocol"),
    [("torch_engine", engine.TorchEngine), ("cpu", engine.CPUEngine), ("cuda", engine.FusedEngine)],
)
def test_an_engine_exports_its_protocol(name, protocol):
    module = importlib.import_module(f"fmtsim.{name}")
    assert set(module.__all__) == names(protocol)
    assert all(hasattr(module, exported) for exported in module.__all__)
