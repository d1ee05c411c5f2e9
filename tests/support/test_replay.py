# SPDX-License-Identifier: Apache-2.0
"""What calls ask of a device, repeated: when, with what, and when not."""

import gc
import struct
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmtsim.spec.cast import RandomKey
from fmtsim.support.replay.hooks import Launch, Structure, drawn, launched, packed, refuse, word_of
from fmtsim.support.replay.programs import Programs
from tests.support.refusals import refused

PAIR = struct.Struct("<2q8s")


class Operations(TorchDispatchMode):
    """The names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Device:
    """Kernels that add bytes to tensors, and how often Python decided on them."""

    def __init__(self):
        self.programs, self.decided, self.launches = Programs(), 0, []

    def add(self, first, *given):
        """Write x + number + first into y."""
        launched(self.started, (first,), given, words=True)
        self.started(first, *map(word_of, given))

    def started(self, first, *words):
        self.launches.append((first, words))

    def call(self, function, *tensors, key=None):
        def decide():
            self.decided += 1
            return function(*tensors)

        return self.programs.run(key, tensors, decide)[0]


def calls(function, count=4, **how):
    """Call a function with other tensors each time, and return the device and what came out."""
    device = Device()
    results = [device.call(lambda x: function(device, x), torch.full((4, 6), float(i)), **how) for i in range(count)]
    return device, results


def test_the_third_call_is_a_program():
    def function(device, x):
        y = torch.empty_like(x.mT.contiguous())
        device.add(3, x, y, None, np.int32(5))
        return y.copy_(x.mT).add_(1), (x.view(6, 4) + 0, [None, 7, "text"])

    device, results = calls(function)
    assert device.decided == 2
    for i, (y, (view, rest)) in enumerate(results):
        assert torch.equal(y, torch.full((6, 4), i + 1.0)) and torch.equal(view, torch.full((6, 4), float(i)))
        assert rest == [None, 7, "text"]
    assert [(first, words[2:]) for first, words in device.launches] == [(3, (0, 5))] * 4


def test_launches_get_the_addresses_of_their_call():
    def function(device, x):
        y = torch.empty(8, dtype=torch.int32)
        device.add((1, 2), Structure(PAIR, (x, None, b"12345678")), y, x)
        return y

    device, results = calls(function, 5)
    assert device.decided == 2
    for (first, (structure, y, x)), result in zip(device.launches, results, strict=True):
        assert first == (1, 2) and PAIR.unpack(structure) == (x, 0, b"12345678") and y == result.data_ptr()


class Kernel(Launch):
    """A launch of two words that a driver counts; every memory that it has made."""

    def __init__(self):
        self.pack, self.made, self.done, self.called, self.errors = struct.Struct("<2q").pack_into, [], [], [], []

    def fill(self):
        self.made.append(SimpleNamespace(bytes=bytearray(16), address=len(self.made)))
        return self.made[-1]

    def driver_call(self, blocks):
        return self.launch, *blocks

    def launch(self, first, second, stream, address, last):
        self.done.append((first, second, stream, last, struct.unpack("<2q", self.made[address].bytes)))
        return (self.errors.pop() if self.errors else 0,)

    def __call__(self, blocks, *words):
        self.called.append((blocks, words))


def test_other_shapes_strides_and_keys_are_calls_of_their_own():
    device = Device()
    for key, x in (
        ("a", torch.ones(4, 6)),
        ("b", torch.ones(4, 6)),
        ("a", torch.ones(6, 4)),
        ("a", torch.ones(6, 4).mT),
    ):
        for _ in range(4):
            assert torch.equal(device.call(lambda x: x + 1, x, key=key), torch.full(x.shape, 2.0))
    assert device.decided == 8


def test_keys_are_drawn_anew_in_their_order():
    numbers, counts = iter(range(100)), []

    def draw(count, source):
        counts.append((count, source))
        return [RandomKey(next(numbers)) for _ in range(count)]

    def function(device, x):
        one, two = (drawn(draw, "source") for _ in range(2))
        data = packed(one, pack(one), pack)
        device.add(0, x, b"head" + data + b"tail" + data, packed(two, pack(two), pack))

    def pack(key):
        return struct.pack("<Q", key.seed + (1 << 60)) * 3

    device, _ = calls(function, 6)
    assert device.decided == 2 and counts == 4 * [(1, "source")] + 4 * [(2, "source")]
    for i, (_, (_, one, two)) in enumerate(device.launches):
        data = pack(RandomKey(2 * i))
        assert one == b"head" + data + b"tail" + data and two == pack(RandomKey(2 * i + 1))


def test_what_lies_inside_longer_bytes_of_a_key_is_part_of_them():
    numbers = iter(range(1, 100))

    def inner(key):
        return struct.pack("<Q", key.seed + (1 << 60))

    def outer(key):
        return inner(key) + packed(key, inner(key), inner) + bytes([key.seed])

    def function(device, x):
        key = drawn(lambda count: [RandomKey(next(numbers)) for _ in range(count)])
        device.add(0, packed(key, outer(key), outer))

    device, _ = calls(function)
    assert device.decided == 2 and [words[0] for _, words in device.launches] == [
        outer(RandomKey(i)) for i in range(1, 5)
    ]


def key_unused(device, x):
    drawn(lambda count: [RandomKey(1)])
    return x + 1


def key_moved(device, x):
    key = drawn(lambda count: [RandomKey(1 << 50)])
    device.add(0, packed(key, b"first", lambda _: b"first"))
    later = RandomKey(key.seed, 1)
    device.add(0, packed(later, b"other", lambda _: b"other"))


def address_as_number(device, x):
    device.add(0, np.uint64(x.data_ptr()))


def address_in_bytes(device, x):
    device.add(0, b"1234" + struct.pack("<q", x.data_ptr() + 8))


def large_constant(device, x, held=torch.ones(100, 100)):  # noqa: B008 - one for all calls
    return held[:4, :6] + x


@pytest.mark.parametrize(
    "function",
    [
        lambda device, x: x * float(x[0, 0]), lambda device, x: x + torch.tensor(3.0), lambda device, x: x.to("meta"),
        lambda device, x: refuse() or x + 1, lambda device, x: torch.equal(x, x) or x, key_unused, key_moved,
        address_as_number, address_in_bytes, large_constant, lambda device, x: [x.mT],
    ],
)  # fmt: skip
def test_what_may_differ_is_never_repeated(function):
    device, _ = calls(function)
    assert device.decided == 4


def test_constants_are_kept_and_written_into():
    count, scale = torch.zeros(()), torch.tensor(2.0)

    def function(device, x):
        count.add_(1)
        return x * scale, scale.reshape(1, 1), torch.rand(2)

    device, results = calls(function, 5)
    assert device.decided == 2 and count == 5
    assert all(torch.equal(y, torch.full((4, 6), 2.0 * i)) for i, (y, _, _) in enumerate(results))
    assert len({tuple(words.tolist()) for _, _, words in results}) == 5  # drawn by torch


def test_steps_between_are_let_go():
    device, last = Device(), []

    def function(x):
        middle = torch.empty(3)
        device.add(0, x, middle)
        y = middle.view(3, 1).mT + 1
        last[:] = [weakref.ref(y)]
        return torch.empty(2)

    for _ in range(3):  # and while they are written down
        device.call(function, torch.ones(2, 2))
        gc.collect()
        assert last[0]() is None
    x = torch.ones(2, 2)
    with Operations() as seen:
        device.call(function, x)
    gc.collect()
    assert device.decided == 2 and last[0]() is None
    assert seen.names == ["aten::empty_strided"] * 2  # no operation reads the sum


def test_a_tensor_that_comes_twice_is_not_two():
    device, x, y = Device(), torch.ones(3), torch.full((3,), 2.0)
    results = [device.call(lambda a, b: a - b, *pair) for pair in ((x, x), (x, x), (y, y), (y, x), (x, y), (x, x))]
    assert device.decided == 4 and [z[0].item() for z in results] == [0, 0, 0, 1, -1, 0]


def test_an_error_is_raised_and_nothing_is_kept():
    wrong = []

    def function(device, x):
        if wrong:
            raise ValueError("wrong")
        return x + 1

    device = Device()
    device.call(lambda x: function(device, x), torch.ones(3))
    wrong.append(1)
    refused("wrong", device.call, lambda x: function(device, x), torch.ones(3), error=ValueError)
    wrong.clear()
    results = [device.call(lambda x: function(device, x), torch.full((3,), float(i))) for i in range(3)]
    assert device.decided == 3 and [y[0].item() for y in results] == [1, 2, 3]


def test_calls_inside_calls_are_part_of_them():
    inner = Device()

    def function(device, x):
        return inner.call(lambda y: y * 2, x) + 1

    device, results = calls(function, 6)
    assert device.decided == inner.decided == 2
    assert [y[0, 0].item() for y in results] == [2 * i + 1 for i in range(6)]


def test_small_tensors_of_launches_lie_in_one_memory():
    """Those that operations or results see have memory of their own, and none overlaps another."""

    def function(device, x):
        parts, scale, seen = torch.empty(70), torch.empty(3, dtype=torch.int64), torch.empty(2, 6)
        device.add(0, x, parts, scale, seen)
        device.add(1, parts, scale)
        return seen.fill_(1), torch.empty(())

    device, results = calls(function)
    for first, second in zip(device.launches[4::2], device.launches[5::2], strict=True):
        _, parts, scale, seen = first[1]
        assert second[1] == (parts, scale) and scale - parts == 512 and not parts <= seen < parts + 512 + 24
    assert all(torch.equal(seen, torch.ones(2, 6)) for seen, _ in results)
