"""What tests share: no test module imports another, and the comparison of bits sees what it should."""

import ast
from pathlib import Path

import pytest
import torch

from tests.support.bits import assert_same_bits, bits, differing, same_bits, stored

ROOT = Path(__file__).parent
NAMES = {path.stem for path in ROOT.rglob("test_*.py")}


def imported(source: str) -> set[str]:
    """Return the test modules that a source imports, inside functions too."""
    parts: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            parts |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "tests"):
            parts |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return parts & NAMES


def test_no_test_module_is_imported():
    paths = [path for path in ROOT.rglob("*.py") if imported(path.read_text(encoding="utf-8"))]
    assert paths == []


@pytest.mark.parametrize(
    "source", ["from tests.cpu.test_gemm import check", "from tests.cpu import test_gemm", "import tests.cpu.test_gemm",
               "def f():\n    from . import test_gemm"],
)  # fmt: skip
def test_an_import_of_a_test_module_is_seen(source):
    assert imported(source) == {"test_gemm"}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_wrong_bit_is_seen(dtype):
    good = torch.tensor([1.5, 0.0, torch.nan]).to(dtype)
    assert_same_bits(good.clone(), good)
    for i, wrong in enumerate((1.75, -0.0, 1.0)):
        bad = good.clone()
        bad[i] = wrong
        assert differing(bad, good) == [i] and not same_bits(bad, good)
        with pytest.raises(AssertionError, match=rf"(?s)here: 1 of 3 differ.*\[{i}\] .* = 0x[0-9a-f]+ and 0x[0-9a-f]+"):
            assert_same_bits(bad, good, what="here")


def test_nan_of_other_bits_shapes_dtypes_and_none_differ():
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert differing(nan, torch.full((2,), torch.nan)) == [1]
    x = torch.zeros(2, 3)
    for other in (x.double(), x.mT, x.int(), None):
        assert not same_bits(x, other)
        with pytest.raises(AssertionError):
            assert_same_bits(other, x)
    assert same_bits(None, None) and same_bits(x, x.numpy())
    assert bits(stored(torch.full((64,), torch.nan, dtype=torch.float64), torch.bfloat16)).unique().tolist() == [0x7FC0]
