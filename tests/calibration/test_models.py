"""Shapes of models, files of shapes, and the calls that follow from them."""

import pytest
import torch

from fmtsim.calibration.models import MODELS, layer_shapes, list_models, model_calls, parse_tokens, read_shapes
from fmtsim.errors import ArgumentError, DataError


def test_models_have_sources_and_shapes():
    assert {"gpt2", "gpt2-xl", "llama-8b", "llama-70b", "bert-large", "vit-l"} <= set(list_models())
    for model in MODELS.values():
        assert model.source and all(n > 0 and k > 0 for n, k, _ in model.layers)
    assert (2304, 768, True) in layer_shapes(["gpt2"])
    assert len(layer_shapes(["gpt2", "gpt2"])) == 5


def test_unknown_models():
    with pytest.raises(ArgumentError, match=r"unknown model 'lama-8b'; did you mean 'llama-8b'"):
        layer_shapes(["lama-8b"])


def test_calls_of_a_layer():
    forward, dgrad, wgrad = sorted(
        model_calls([(3072, 768, True)], [512], ["bf16"]), key=lambda call: (call.operation, call.m)
    )
    assert (forward.operation, forward.m, forward.n, forward.k, forward.bias) == ("linear", 512, 3072, 768, True)
    assert (forward.a_layout, forward.b_layout) == ("row", "row")
    assert (dgrad.m, dgrad.n, dgrad.k, dgrad.a_layout, dgrad.b_layout) == (512, 768, 3072, "row", "column")
    assert (wgrad.m, wgrad.n, wgrad.k, wgrad.a_layout, wgrad.b_layout) == (3072, 768, 512, "column", "column")


def test_calls_are_those_of_autograd():
    """What torch multiplies in forward and backward, by its own words."""
    x = torch.randn(512, 768, requires_grad=True)
    w = torch.randn(3072, 768, requires_grad=True)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                a, b = args[-2:]
                layouts = "column" if a.stride(0) == 1 else "row", "column" if b.stride(1) == 1 else "row"
                seen.append((a.shape[0], b.shape[1], a.shape[1], *layouts))
            return function(*args, **(kwargs or {}))

    with Watch():
        torch.nn.functional.linear(x, w).square().sum().backward()
        x.grad = w.grad = None
    calls = [(c.m, c.n, c.k, c.a_layout, c.b_layout) for c in model_calls([(3072, 768, False)], [512], ["bf16"])]
    assert sorted(calls) == sorted(seen)


def test_fp8_leaves_out_what_torch_refuses():
    assert not model_calls([(50257, 768, False)], [512], ["fp8_fast"], ["forward"])
    assert (
        len(model_calls([(768, 768, False)], [512, 77], ["fp8_fast", "fp8_slow"])) == 6
    )  # no wgrad of 77 tokens; dgrad of a square is forward


def test_tokens():
    assert parse_tokens("1,77, 512") == [1, 77, 512]
    assert parse_tokens("1..8192") == [1 << i for i in range(14)]
    assert parse_tokens("3..20,5") == [3, 4, 5, 8, 16, 20]
    for text in ("", "0", "a", "8..4", "1,,2"):
        with pytest.raises(ArgumentError, match="is not possible; write counts such as"):
            parse_tokens(text)


def test_unknown_dtypes():
    with pytest.raises(ArgumentError, match=r"--dtypes 'fp4' is not possible; choose from bf16, fp16, tf32"):
        model_calls([(8, 8, False)], [1], ["fp4"])


def test_files_of_shapes(tmp_path):
    path = tmp_path / "shapes.txt"
    path.write_text("# outputs inputs\n768 3072 bias\n\n3072x768\n768, 768 # square\n")
    assert read_shapes(path) == [(768, 3072, True), (3072, 768, False), (768, 768, False)]
    path.write_text("# nothing\n")
    with pytest.raises(DataError, match="has no shapes; write a line for each linear layer"):
        read_shapes(path)
    path.write_text("768 3072\n768\n")
    with pytest.raises(DataError, match="line 2: '768' is no shape; write 'outputs inputs' and 'bias'"):
        read_shapes(path)
