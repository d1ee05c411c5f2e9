"""A product run natively and emulated: here by a verb that only says how it was called."""

import torch

from fmtsim import compare, compare_native


def test_the_native_result_is_compared_with_the_emulated_one():
    asked = []

    def verb(x, *, bias, native, target):
        asked.append((native, x.dtype, bias.dtype, target))
        return torch.tensor([1.0, 2.0 if native else -2.0])

    found = compare_native(verb, torch.ones(2), bias=torch.ones(1), target="h200")
    assert asked == [(native, torch.float32, torch.float32, "h200") for native in (True, False)]
    assert not found.equal and str(found) == str(compare(torch.tensor([1.0, 2.0]), torch.tensor([1.0, -2.0])))


def test_operands_and_options_move_to_where_the_emulation_is():
    devices = []

    def verb(x, *, bias, native):
        devices.append((x.device.type, bias.device.type))
        return torch.ones(2)

    assert compare_native(verb, torch.ones(2), bias=torch.ones(1), emulate_on="meta").equal
    assert devices == [("cpu", "cpu"), ("meta", "meta")]
