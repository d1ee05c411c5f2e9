# SPDX-License-Identifier: Apache-2.0
"""What a GPU computes between products, held to what an H200 returned (``tools/record_machine.py`` records it)."""

import json
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.cpu.runtime.jit import kernel
from fmtsim.cpu.runtime.kernel_numbers import philox
from fmtsim.machine import attention_efficient, attention_rows, loss, mufu, norm, softmax
from fmtsim.machine.arrays import STRIDED, apply, fma
from fmtsim.machine.simulate import simulate
from fmtsim.machine.unknown import BySource
from fmtsim.support.mufu_tables import approximate_reciprocal
from tests.machine.cases import FUNCTIONS, all_cases, digest, numbers

RECORD = json.loads((Path(__file__).parent / "data" / "h200.json").read_text("utf-8"))["cases"]
SAMPLE = 101  # calls of operators that lie this many apart are compared by default
ATTENTION, SOME = ("attention", "biased", "masked"), 6  # calls of attention, which lie this many apart
UNIT = {"ex2": mufu.ex2, "lg2": mufu.lg2, "rcp": mufu.rcp, "rsqrt": mufu.rsqrt, "sqrt": mufu.sqrt, "sin": mufu.sin,
        "cos": mufu.cos, "tanh": mufu.tanh}  # fmt: skip
GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "mufu_h200.npz"


def differing(step: int, some: int, kinds: tuple[str, ...] = ()) -> list[str]:
    """Return the recorded cases whose bits differ, of functions and every ``step``-th of the others, or of kinds."""
    wrong = []
    for number, case in enumerate(all_cases()):
        kind = case.name.split()[0]
        chosen = number < 3 * len(FUNCTIONS) or number % step == 0 or case.name == "llama 2x64 bfloat16"
        chosen = kind in kinds if kinds else chosen or kind in ATTENTION
        if case.name in RECORD and chosen and (kind not in ATTENTION or number % some == 0):
            with simulate(target="h200", strict=True):
                if digest(*case.call("cpu")) != RECORD[case.name]:
                    wrong.append(case.name)
    return wrong


def test_recorded_calls_have_the_bits_of_an_h200():
    assert differing(SAMPLE, SOME) == []


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("masked", lambda patch: patch.setitem(attention_rows.MIN_EXPONENTS, torch.bfloat16, (-126, 8))),
        ("biased", lambda patch: patch.setattr(attention_efficient, "_STEP", 16)),
        ("biased", lambda patch: patch.setattr(
            attention_efficient, "_scores", lambda x, factor, bias: x * factor if bias is None else fma(x, factor, bias)
        )),
    ],
    ids=["a bit of P", "sums of 16 columns", "a bias that is fused"],
)  # fmt: skip
def test_planted_errors_of_attention_are_seen(kind, plant, monkeypatch):
    plant(monkeypatch)
    assert differing(SAMPLE, 4 * SOME, (kind,))


@pytest.mark.slow
def test_all_recorded_calls_have_the_bits_of_an_h200():
    assert differing(1, 1) == []


def test_every_case_is_recorded():
    assert [case.name for case in all_cases()] == list(RECORD)


def test_another_order_of_sums_is_seen():
    # 1,024 threads a row in place of a warp
    x = numbers(1, (4, 1000), "normal", torch.float32)
    right = softmax.forward(x, False, x.dtype)
    other = softmax.forward(x, False, x.dtype, softmax.RowPlan(STRIDED, 1024, 1, 4))
    assert digest(right) != digest(other)
    assert torch.allclose(right, other)


def test_rows_in_pieces_have_the_bits_of_all_at_once(monkeypatch):
    # threads begin where a row is aligned to 16 bytes, which rows of 24,577 are at every eighth alone
    x = numbers(1, (40, 24577), "normal", torch.bfloat16)
    whole = softmax.forward(x, False, torch.float32)
    whole_gradient = softmax.backward(x, whole, True, torch.float32)
    monkeypatch.setattr(softmax, "_PIECE", 1)
    assert [piece.stop for piece in softmax._pieces(x)] == [16, 32, 48]
    assert digest(softmax.forward(x, False, torch.float32)) == digest(whole)
    assert digest(softmax.backward(x, whole, True, torch.float32)) == digest(whole_gradient)


@pytest.mark.parametrize(
    ("rows", "height"), [(1, 1), (63, 1), (64, 8), (127, 8), (128, 16), (255, 16), (256, 32), (270, 32)]
)
@pytest.mark.parametrize("centred", [True, False])
def test_gradients_of_norms_weights_are_dealt_to_threads_by_eight_rows(rows, height, centred):
    """The threads of a column by the number of rows, each a chain of multiply-adds; then halves."""
    x, g = (numbers(seed, (rows, 8), "normal", torch.float32) for seed in (1, 2))
    mean, rstd = (numbers(seed, (rows, 1), "normal", torch.float32) for seed in (3, 4))
    found = norm.layer_norm_backward(g, x, [8], mean if centred else None, rstd, torch.ones(8), [True] * 3)
    product = (g * (x - mean if centred else x)).numpy()
    scaled, added = np.zeros((8, height), np.float32), np.zeros((8, height), np.float32)
    for row in range(rows):
        thread = row // 8 % height
        scaled[:, thread] = fma(product[row], rstd.numpy()[row], scaled[:, thread])
        added[:, thread] += g.numpy()[row]
    while height > 1:
        height //= 2
        scaled, added = (sums[:, :height] + sums[:, height:] for sums in (scaled, added))
    assert np.array_equal(found[1].numpy(), scaled[:, 0]) and np.array_equal(found[2].numpy(), added[:, 0])
    one = norm.layer_norm_backward(g, x, [8], mean if centred else None, rstd, None, [True, False, False])
    assert torch.equal(one[0], found[0]) and one[1] is one[2] is None


@pytest.mark.parametrize("rows", [150, 3000])
def test_losses_of_images_are_added_within_warps_of_a_block_first(rows):
    """A block of 1,024 threads for each image, a chain in each thread; the warps' 32 sums by halving, as theirs."""
    x, target = numbers(1, (2, 3, rows, 1), "wide", torch.float32), torch.arange(2 * rows).view(2, rows, 1) % 3
    total = np.zeros((2, 32, 32), np.float32)
    for image, row in np.ndindex(2, rows):
        slot = image, row % 1024 // 32, row % 32
        total[slot] -= x[image, int(target[image, row, 0]), row, 0].numpy()
    for _ in range(2):
        while total.shape[-1] > 1:
            total = np.add(*np.split(total, 2, -1))
        total = total[..., 0]
    try:
        y, _ = loss.nll_loss(x, target, None, loss.SUM, -100)
    except BySource as reason:
        y, _ = reason.args[1]
    assert y.item() == total[0] + total[1]
    assert not loss.nll_loss(x, target, None, loss.NONE, 1)[0][target == 1].signbit().any()  # ignored places are +0


# Step by step as the unit's multipliers: an oracle of Python's integers, from the file of coefficients alone.


def interpolated(name: str, argument: int) -> int:
    """Return c0 + c1 x + c2 x^2 in 2^-18 of a last place for 23 bits of an argument."""
    low = 16 if name == "rcp" else 17
    lines = (Path(mufu.__file__).parents[1] / "support/mufu.csv").read_text("utf-8").splitlines()
    row = next(line for line in lines if line.startswith(f"{name},{argument >> low},"))
    c0, c1, c2 = map(int, row.split(",")[2:])
    x = (argument & ((1 << low) - 1)) << (17 - low)
    square = 0
    for i in range(17):
        for j in range(i + 1):
            column = 2 * i if i == j else i + j + 1  # of the product of two bits, which is added once
            if x >> i & 1 and x >> j & 1 and column >= 19:
                square += 1 << column
    log2_c0, log2_c1, log2_c2, bias = mufu._SCALES[name]
    return (c0 << log2_c0) + bias + (c1 * x << log2_c1) + ((c2 * (square >> 19)) << log2_c2)


@pytest.mark.parametrize("name", ["ex2", "rcp", "rsqrt", "sqrt"])
def test_the_unit_is_its_coefficients(name):
    table = {"rsqrt": "rsq0", "sqrt": "sqrt0"}.get(name, name)
    arguments = np.array([1, 2, 3, 0x1FFFF, 0x20000, 0x3FFFFF, 0x400001, 0x7FFFFF, 0x123456, 0x654321])
    x = (arguments / 2**23).astype(np.float32) + np.float32(0 if name == "ex2" else 1)
    expected = [
        math.ldexp(interpolated(table, int(a)) >> 18, -24 if name in ("rcp", "rsqrt") else -23) for a in arguments
    ]
    assert apply(UNIT[name], x).tolist() == expected


def test_the_reciprocal_of_torch_operations_is_the_units():
    edges = torch.tensor([0, 1, 0x7FFFFF, 0x800000, 0x7E7FFFFF, 0x7E800000, 0x7E800001, 0x7FC00000])
    bits = torch.cat([edges, torch.arange(0, 0x7F800001, 6151), torch.arange(0x3F800000, 0x40000001, 17)])
    x = bits.int().view(torch.float32)
    expected = torch.from_numpy(apply(mufu.rcp, x.numpy())).nan_to_num(nan=-1.0, posinf=torch.inf)
    assert torch.equal(approximate_reciprocal(x).nan_to_num(nan=-1.0, posinf=torch.inf), expected)


def test_errors_of_the_unit_are_within_two_last_places():
    x = np.linspace(1.001, 3.999, 20_001).astype(np.float32)
    for name, exact in (("ex2", np.exp2), ("rcp", np.reciprocal), ("sqrt", np.sqrt), ("lg2", np.log2)):
        y = exact(x.astype(np.float64))
        # the unit's documentation promises 2 ulp, and an absolute error of 2^-22 for lg2
        bound = 2.0**-22 if name == "lg2" else 2 * np.spacing(y.astype(np.float32)).astype(np.float64)
        assert (np.abs(apply(UNIT[name], x) - y) <= bound).all(), name


@pytest.mark.skipif(not GOLDEN.exists(), reason=f"{GOLDEN} is not there: the whole tables of an H200")
@pytest.mark.parametrize(("name", "scale"), [("ex2", 0), ("rcp", 1), ("lg2", 1)])
def test_whole_tables_of_an_h200(name, scale):
    with np.load(GOLDEN) as golden:
        steps = np.frombuffer(lzma.decompress(golden[name].tobytes()), np.int32 if name == "lg2" else np.int8)
        bits = golden[f"{name}0"] + np.concatenate([[0], np.cumsum(steps.astype(np.int64))])
    x = (np.arange(1 << 23) / 2**23).astype(np.float32) + np.float32(scale)
    assert int((apply(UNIT[name], x).view(np.int32) != bits).sum()) == 0


def test_ends_of_the_range_and_powers_of_two():
    """Subnormal arguments and results are zeros of their sign; the smallest normal number is none of them.

    A negative logarithm is one's complement, cut off: one or two last places nearer to zero.
    """
    below, least = float(np.nextafter(np.float32(2.0**-126), np.float32(0))), 2.0**-126
    zero, inf, nan = 0.0, math.inf, math.nan
    table = {
        "sqrt": {below: zero, -below: -zero, least: 2.0**-63, -least: nan, 2.0**-124: 2.0**-62, 4.0: 2.0,
                 2.0**126: 2.0**63},
        "rsqrt": {below: inf, -below: -inf, least: 2.0**63, -least: nan, 4.0: 0.5, 2.0**126: 2.0**-63},
        "rcp": {below: inf, -below: -inf, least: 2.0**126, -least: -(2.0**126), 4.0: 0.25, 2.0**126: least,
                2.0**127: zero, -(2.0**127): -zero},
        "lg2": {below: -inf, -below: -inf, least: -126.0 + 2.0**-17, -least: nan, 0.5: -1.0 + 2.0**-23, 1.0: zero,
                2.0**127: 127.0},
        "ex2": {below: 1.0, -below: 1.0, least: 1.0, -126.0: least, -127.0: zero, 127.0: 2.0**127, 128.0: inf,
                -600.0: zero, 600.0: inf, 1.0: 2.0, -1.0: 0.5},
        "tanh": {below: below, 2.0**-8: 2.0**-8, -(2.0**-7): -(2.0**-7) + 2.0**-23, 7.99999: 1 - 2.0**-22, -8.0: -1.0},
    }  # fmt: skip
    for name, values in table.items():
        found = apply(UNIT[name], np.array(list(values), np.float32))
        wanted = np.array(list(values.values()), np.float32)
        same = (found.view(np.int32) == wanted.view(np.int32)) | (np.isnan(found) & np.isnan(wanted))
        assert same.all(), (name, dict(zip(values, found.tolist(), strict=True)))


def test_special_arguments():
    x = np.array([0.0, -0.0, 1e-40, -1e-40, math.inf, -math.inf, math.nan, -1.0], np.float32)
    expected = {
        "ex2": ["3f800000"] * 4 + ["7f800000", "00000000", "7fffffff", "3f000000"],
        "rcp": ["7f800000", "ff800000", "7f800000", "ff800000", "00000000", "80000000", "7fffffff", "bf800000"],
        "rsqrt": ["7f800000", "ff800000", "7f800000", "ff800000", "00000000", "7fffffff", "7fffffff", "7fffffff"],
        "sqrt": ["00000000", "80000000", "00000000", "80000000", "7f800000", "7fffffff", "7fffffff", "7fffffff"],
        "lg2": ["ff800000"] * 4 + ["7f800000", "7fffffff", "7fffffff", "7fffffff"],
        "sin": ["00000000", "80000000", "00000000", "80000000"] + ["7fffffff"] * 3 + ["bf576aa3"],
        "cos": ["3f800000"] * 4 + ["7fffffff"] * 3 + ["3f0a5141"],
        "tanh": ["00000000", "80000000", "000116c2", "800116c2", "3f800000", "bf800000", "7fffffff", "bf42f848"],
    }
    for name, bits in expected.items():
        assert [f"{b:08x}" for b in apply(UNIT[name], x).view(np.uint32)] == bits, name


# simulate


def test_strict_refuses_by_name():
    message = (
        "convolution: forward of .* has it: its bits on h200 are not known; put another operator in its place, or "
        "leave strict=False"
    )
    with pytest.raises(fmtsim.errors.ArgumentError, match=message), fmtsim.simulate(target="h200", strict=True):
        nn.functional.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2))


def test_what_is_not_known_is_counted():
    with fmtsim.simulate() as run:
        nn.functional.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)).tanh()
    (what,) = run.unknown
    assert what.startswith("convolution: forward of a batch of 1") and run.exact["tanh"] == 1
    assert f"computed by torch on the host (1)\n  1  {what}\n" in run.summary


def test_sums_by_atomics_have_no_bits():
    q, k, v = (torch.randn(1, 1, n, 32).bfloat16().requires_grad_() for n in (64, 400, 400))
    with fmtsim.simulate(target="h200") as run:
        functional.scaled_dot_product_attention(q, k, v).sum().backward()
    (reason,) = run.nondeterministic
    assert "the gradient of q for 400 keys, not causal: blocks of keys are added by atomics" in reason
    assert "no bits to reproduce" in run.summary


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout"),
        ({"attn_mask": torch.zeros(8, 8, requires_grad=True), "enable_gqa": True}, "a mask that takes a gradient"),
        ({"value": torch.ones(1, 2, 8, 16)}, "values of another head size"),
    ],
)
def test_attention_by_another_kernel_than_the_hosts_is_unknown(arguments, reason):
    x = torch.ones(1, 2, 8, 32)
    arguments = {"query": x, "key": x, "value": x} | arguments
    with fmtsim.simulate() as run:
        functional.scaled_dot_product_attention(**arguments)
    assert f"scaled_dot_product_attention: attention with {reason}" in run.unknown
    # both take the math path where it alone is allowed
    with fmtsim.simulate() as run, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        functional.scaled_dot_product_attention(**arguments)
    assert "scaled_dot_product_attention" not in str(run.unknown)


def test_many_indices_and_few_rows_of_an_embedding_have_no_bits():
    backward = torch.ops.aten.embedding_dense_backward
    with fmtsim.simulate() as run:
        backward(torch.ones(4096, 2), torch.arange(4096) % 32, 32, -1, False)
        backward(torch.ones(3072, 2), torch.arange(3072) % 32, 32, -1, False)
        backward(torch.ones(4096, 2), torch.arange(4096) % 32, 160, -1, False)
    ((reason, count),) = run.nondeterministic.items()
    assert count == 1 and "an embedding of 32 rows by 4096 indices: sums are added by atomics" in reason


def test_a_number_in_a_float32_tensor_is_a_guess_beside_16_bits_unless_it_has_these():
    x = torch.ones(8).bfloat16()
    with fmtsim.simulate() as run:
        y, half = x * torch.tensor(0.1), x * torch.tensor(0.5)
    assert torch.equal(y, x * torch.tensor(0.1).bfloat16()) and torch.equal(half, x * 0.5)
    assert run.guess.total() == 1 and run.exact["mul"] == 1


def test_a_number_is_added_to_16_bits_as_float32():
    # 1e-8 lies between two bfloat16, of which the host takes one
    x = torch.linspace(1e-9, 1e-7, 200).bfloat16()
    with fmtsim.simulate(strict=True):
        y = x + 1e-8
    assert y.tolist() == (x.float() + 1e-8).bfloat16().tolist() != (x + 1e-8).tolist()


def test_an_unknown_target_is_refused():
    with pytest.raises(fmtsim.errors.ArgumentError, match="target='h20' cannot be simulated; did you mean 'h200'"):
        fmtsim.simulate(target="h20")


def test_random_numbers_are_the_gpus_where_it_draws_them():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with fmtsim.simulate() as run:
        assert torch.equal(torch.rand(3), expected)  # without a device the CPU draws, on a GPU, too
        assert not torch.equal(torch.rand(3, device="cuda"), expected)
        torch.randperm(8, device="cuda")
        nn.init.normal_(nn.Linear(2, 2).weight)
        nn.LSTM(4, 4)(torch.ones(1, 1, 4))
    reasons = ("randperm: random numbers", "normal_: a parameter", "lstm: a recurrent network")
    assert all(any(reason in unknown for unknown in run.unknown) for reason in reasons)
    assert run.exact["rand"] == 2  # noqa: PLR2004


def test_dropout_draws_again_what_a_checkpoint_draws_again():
    layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 8)).bfloat16()
    x = torch.ones(4, 64).bfloat16().requires_grad_()
    gradients = []
    for way in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        with fmtsim.simulate(strict=True):
            torch.manual_seed(3)
            gradients.append(torch.autograd.grad(way(x).sum(), x)[0])
            torch.nn.functional.dropout(x, 0.3)  # moves the generator on
    assert torch.equal(*gradients)


def test_philox_has_the_published_numbers():
    # known answers of Random123 (kat_vectors): counter and key of zeros, and of ones
    words = np.empty(4, np.uint32)
    answers = []
    for key, counter in ((0, 0), (2**32 - 1, 2**64 - 1)):
        philox_words(words, np.uint32(key), np.uint64(counter))
        answers.append([f"{word:08x}" for word in words])
    assert answers == [
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"],
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"],
    ]


@kernel
def philox_words(words, key, counter):
    low, high = np.uint32(counter & np.uint64(0xFFFFFFFF)), np.uint32(counter >> np.uint64(32))
    words[0], words[1], words[2], words[3] = philox(counter, low, high, key, key)


def test_rows_that_are_masked_whole_are_zero():
    with fmtsim.simulate(strict=True):
        y = torch.ops.aten._safe_softmax(torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]]), -1)
    assert y.tolist() == [[0.0, 0.0], [0.5, 0.5]]


def test_integers_and_float64_are_left_alone():
    with fmtsim.simulate(target="h200") as run:
        assert (torch.arange(4) + 1).tolist() == [1, 2, 3, 4]
    assert not run.exact


def test_the_mode_ends_with_its_block():
    x = torch.linspace(-3, 3, 100)
    with fmtsim.simulate(target="h200"):
        inside = x.tanh()
    assert not torch.equal(inside, x.tanh())


def test_the_smallest_normal_number_has_a_root_and_smaller_ones_are_zeros():
    x = np.array([2.0**-126, 2.0**-126 - 2.0**-149, 2.0**-149, -(2.0**-149)], np.float32)
    assert apply(UNIT["sqrt"], x).view(np.int32).tolist() == [(127 - 63) << 23, 0, 0, -(1 << 31)]
