# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - kernels in strings
"""What threads of a block do to each other and to memory: divergence, barriers, atomics, warps; and every error's text."""

import random
from collections.abc import Sequence

import pytest
import torch

from fmtsim.machine.ptx.execute import execute
from fmtsim.machine.ptx.parse import parse
from fmtsim.support.errors import ArgumentError
from tests.machine.ptx.oracle import logic, matched, reduced, shuffled, voted

_HEAD = """.version 8.7
.target sm_90a
.address_size 64
{module}
.visible .entry k(.param .u64 x, .param .u64 y) {{
.reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<32>; .reg .b64 %d<32>; .reg .f32 %f<8>;
ld.param.u64 %d0, [x]; ld.param.u64 %d9, [y];
mov.u32 %r0, %tid.x;
mul.wide.u32 %d8, %r0, 4; add.u64 %d1, %d0, %d8; add.u64 %d10, %d9, %d8;
{body}
ret;
}}
"""


def run(
    body: str, out: torch.Tensor, source: torch.Tensor | None = None, *, threads: Sequence[int] = (32, 1, 1),
    grid: tuple[int, int, int] = (1, 1, 1), module: str = "", shared_bytes: int = 0,
) -> list[int]:  # fmt: skip
    """Run a kernel: %d0 is the address of ``out``, %d1 that of the thread's int32 of it; %d9, %d10 the same of ``source``."""
    arguments = [out, out if source is None else source]
    text = _HEAD.format(body=body, module=module)
    execute(parse(text), "k", grid, tuple(threads), arguments, shared_bytes=shared_bytes)  # type: ignore[arg-type]
    return out.tolist()


def words(count: int = 32) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


# Divergence


def test_branches_that_part_meet_again() -> None:
    body = """
    mov.u32 %r1, 100; and.b32 %r2, %r0, 1; and.b32 %r3, %r0, 2;
    setp.ne.u32 %p0, %r2, 0; setp.ne.u32 %p1, %r3, 0;
    @%p0 bra ODD;
    add.u32 %r1, %r1, 1; @!%p1 bra JOIN; add.u32 %r1, %r1, 10; bra JOIN;
    ODD: @%p1 bra THREE; add.u32 %r1, %r1, 1000; bra JOIN;
    THREE: mul.lo.u32 %r1, %r1, 3;
    JOIN: activemask.b32 %r4; add.u32 %r1, %r1, %r0;
    st.global.u32 [%d1], %r1; st.global.u32 [%d1+128], %r4;"""
    got = run(body, words(64))
    assert got[:32] == [{0: 101, 1: 1100, 2: 111, 3: 300}[t & 3] + t for t in range(32)]
    assert got[32:] == [-1] * 32


def test_loops_end_at_a_different_time_in_each_thread() -> None:
    body = """
    mov.u32 %r1, 0; mov.u32 %r2, 0;
    LOOP: setp.ge.u32 %p0, %r2, %r0; @%p0 bra DONE; mov.u32 %r3, 0;
    INNER: setp.gt.u32 %p1, %r3, %r2; @%p1 bra NEXT; add.u32 %r1, %r1, %r3; add.u32 %r3, %r3, 1; bra INNER;
    NEXT: add.u32 %r2, %r2, 1; bra.uni LOOP;
    DONE: st.global.u32 [%d1], %r1;"""
    assert run(body, words(70), threads=(70, 1, 1)) == [sum(sum(range(i + 1)) for i in range(t)) for t in range(70)]


def test_threads_that_return_early_store_nothing_more() -> None:
    body = """
    setp.gt.u32 %p0, %r0, 20; setp.eq.u32 %p1, %r0, 3;
    @%p0 ret; st.global.u32 [%d1], 7; @%p1 exit; @!%p1 st.global.u32 [%d1], 8; bar.sync 0;"""
    assert run(body, words()) == [7 if t == 3 else 8 if t <= 20 else 0 for t in range(32)]


def test_an_index_chooses_a_branch() -> None:
    body = """
    and.b32 %r1, %r0, 3; targets: .branchtargets A, B, C, A;
    brx.idx %r1, targets;
    A: mov.u32 %r2, 1; bra END;  B: mov.u32 %r2, 2; bra END;  C: mov.u32 %r2, 3;
    END: st.global.u32 [%d1], %r2;"""
    assert run(body, words()) == [(1, 2, 3, 1)[t & 3] for t in range(32)]
    with pytest.raises(ArgumentError, match=r"a branch has no target 3, thread 3 of block \(0, 0, 0\): brx.idx"):
        run(body.replace("C, A;", "C;"), words())


# Barriers


@pytest.mark.parametrize("threads", [1, 31, 33, 100, 1000, 1024])
def test_all_threads_of_a_block_meet_at_a_barrier(threads: int) -> None:
    body = """
    mov.u32 %r5, buffer; mov.u32 %r6, %ntid.x; shl.b32 %r1, %r0, 2; add.u32 %r1, %r1, %r5;
    st.shared.u32 [%r1], %r0; bar.sync 0;
    sub.u32 %r2, %r6, %r0; mad.lo.u32 %r2, %r2, 4, %r5; ld.shared.u32 %r3, [%r2+-4]; st.global.u32 [%d1], %r3;"""
    got = run(body, words(threads), threads=(threads, 1, 1), module=".shared .align 4 .b8 buffer[4096];")
    assert got == list(range(threads))[::-1]


def test_threads_that_end_let_a_barrier_go() -> None:
    body = (
        "setp.gt.u32 %p0, %r0, 20; @%p0 bra OUT; bar.sync 0; st.global.u32 [%d1], 5; ret; OUT: st.global.u32 [%d1], 6;"
    )
    assert run(body, words(64), threads=(64, 1, 1)) == [5] * 21 + [6] * 43


def test_a_warp_with_few_threads_counts_whole_at_a_named_barrier() -> None:
    assert run("bar.sync 1, 64; st.global.u32 [%d1], 5;", words(40), threads=(40, 1, 1)) == [5] * 40


@pytest.mark.parametrize("producer", [0, 2])
def test_named_barriers_count_the_warps_that_come(producer: int) -> None:
    # warp 1 waits at barrier 3 for a producer that does not wait; the other warp never comes
    body = f"""
    shr.u32 %r1, %r0, 5; setp.eq.u32 %p0, %r1, {producer}; setp.eq.u32 %p1, %r1, 1; and.b32 %r2, %r0, 31;
    mov.u32 %r5, buffer; mad.lo.u32 %r5, %r2, 4, %r5;
    @%p1 bra CONSUMER; @!%p0 ret; add.u32 %r3, %r0, 1000; st.shared.u32 [%r5], %r3; bar.arrive 3, 64; ret;
    CONSUMER: bar.sync 3, 64; ld.shared.u32 %r4, [%r5]; st.global.u32 [%d1], %r4;"""
    got = run(body, words(96), threads=(96, 1, 1), module=".shared .b32 buffer[32];")
    assert got[32:64] == [1000 + 32 * producer + t for t in range(32)]


@pytest.mark.parametrize("first", ["PRODUCER", "CONSUMER"])
def test_a_producer_and_a_consumer_take_turns_at_mbarriers(first: str) -> None:
    # 5 values pass through one place; whose code stands first is the parameter
    roles = {
        "PRODUCER": """
    PRODUCER: mov.u32 %r3, 0;
    PLOOP: and.b32 %r4, %r3, 1; xor.b32 %r4, %r4, 1;
    PWAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [empty], %r4; @!%p2 bra PWAIT;
    mul.lo.u32 %r6, %r3, %r3; add.u32 %r6, %r6, 1; st.shared.u32 [slot], %r6;
    mbarrier.arrive.shared::cta.b64 %d3, [full];
    add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 5; @%p3 bra PLOOP; ret;""",
        "CONSUMER": """
    CONSUMER: mov.u32 %r3, 0; mov.u32 %r5, 0;
    CLOOP: and.b32 %r4, %r3, 1;
    CWAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [full], %r4; @!%p2 bra CWAIT;
    ld.shared.u32 %r6, [slot]; mad.lo.u32 %r5, %r5, 100, %r6;
    mbarrier.arrive.shared::cta.b64 _, [empty];
    add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 5; @%p3 bra CLOOP; st.global.u32 [%d0], %r5; ret;""",
    }
    second = "CONSUMER" if first == "PRODUCER" else "PRODUCER"
    body = f"""
    setp.eq.u32 %p0, %r0, 0; @!%p0 bra READY; mbarrier.init.shared::cta.b64 [full], 1; mbarrier.init.shared::cta.b64 [empty], 1;
    READY: bar.sync 0; setp.eq.u32 %p1, %r0, 32; @%p0 bra PRODUCER; @%p1 bra CONSUMER; ret;
    {roles[first]} {roles[second]}"""
    module = ".shared .align 8 .b64 full; .shared .align 8 .b64 empty; .shared .b32 slot;"
    assert run(body, words(1), threads=(64, 1, 1), module=module) == [102051017]  # 1, 2, 5, 10, 17


def test_an_mbarrier_waits_for_arrivals_and_for_bytes() -> None:
    body = """
    setp.eq.u32 %p0, %r0, 0; @!%p0 bra READY; mbarrier.init.shared::cta.b64 [bar], 2;
    READY: bar.sync 0; @!%p0 bra WAIT;
    mbarrier.test_wait.parity.shared::cta.b64 %p4, [bar], 0; selp.u32 %r4, 1, 0, %p4; st.global.u32 [%d0+128], %r4;
    mbarrier.arrive.shared::cta.b64 %d4, [bar];
    mbarrier.test_wait.shared::cta.b64 %p4, [bar], %d4; selp.u32 %r4, 1, 0, %p4; st.global.u32 [%d0+132], %r4;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
    mbarrier.test_wait.shared::cta.b64 %p4, [bar], %d4; selp.u32 %r4, 1, 0, %p4; st.global.u32 [%d0+136], %r4;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [buffer], [%d9], 128, [bar];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0; @!%p1 bra WAIT;
    @%p0 mbarrier.arrive.shared::cta.b64 _, [bar];
    mbarrier.test_wait.parity.shared::cta.b64 %p4, [bar], 1; selp.u32 %r4, 1, 0, %p4; @%p0 st.global.u32 [%d0+140], %r4;
    @%p0 mbarrier.arrive.shared::cta.b64 _, [bar];
    mbarrier.test_wait.parity.shared::cta.b64 %p4, [bar], 1; selp.u32 %r4, 1, 0, %p4; @%p0 st.global.u32 [%d0+144], %r4;
    mov.u32 %r5, buffer; mad.lo.u32 %r5, %r0, 4, %r5; ld.shared.u32 %r6, [%r5]; st.global.u32 [%d1], %r6;"""
    module = ".shared .align 8 .b64 bar; .shared .align 128 .b8 buffer[128];"
    got = run(body, words(37), torch.arange(32, dtype=torch.int32) * 3, module=module)
    assert got == [*range(0, 96, 3), 0, 0, 0, 0, 1]
    with pytest.raises(
        ArgumentError, match="threads wait at a barrier to which the others never come, thread 0 .*try_wait"
    ):
        run(body.replace("128, [bar];", "112, [bar];"), words(37), torch.zeros(32, dtype=torch.int32), module=module)


# Atomics and warps


@pytest.mark.parametrize(("space", "place"), [("global", "%d0"), ("shared", "cell"), ("", "%d0")])
def test_atomics_return_the_values_in_the_order_of_the_threads(space: str, place: str) -> None:
    operations = {
        "add.u32": lambda o, v: o + v & 0xFFFFFFFF, "min.u32": min, "max.u32": max, "and.b32": lambda o, v: o & v,
        "or.b32": lambda o, v: o | v, "xor.b32": lambda o, v: o ^ v, "exch.b32": lambda o, v: v,
        "inc.u32": lambda o, v: 0 if o >= v else o + 1, "dec.u32": lambda o, v: v if o == 0 or o > v else o - 1,
        "min.s32": lambda o, v: min(o, v, key=lambda c: c ^ 1 << 31), "max.s32": lambda o, v: max(o, v, key=lambda c: c ^ 1 << 31),
        "cas.b32": lambda o, v: v if o == 5 else o,
    }  # fmt: skip
    values = [(7 * t * t * t + 3) % 19 + (1 << 31 if t % 3 == 1 else 0) for t in range(32)]
    for name, combine in operations.items():
        compare = ", 5" if name.startswith("cas") else ""
        full = f"atom.{space}.{name}".replace("..", ".")
        body = f"""
    st.{space or "global"}.u32 [{place}], 5; bar.sync 0; ld.global.u32 %r1, [%d10];
    {full} %r2, [{place}]{compare}, %r1; bar.sync 0; ld.{space or "global"}.u32 %r3, [{place}];
    bar.sync 0; st.global.u32 [%d1], %r2; st.global.u32 [%d1+128], %r3;"""
        source = torch.tensor(values, dtype=torch.int64).to(torch.int32)
        got = run(body, words(64), source, module=".shared .b32 cell;")
        old, expected = 5, []
        for value in values:
            expected.append(old)
            old = combine(old, value)
        assert [code & 0xFFFFFFFF for code in got] == [*expected, *[old] * 32], name


def test_reductions_of_floats_and_64_bits() -> None:
    body = """
    cvt.rn.f32.u32 %f1, %r0; red.global.add.f32 [%d0], %f1; cvt.u64.u32 %d2, %r0; shl.b64 %d2, %d2, 33;
    red.global.add.u64 [%d0+8], %d2; mov.b32 %r1, 0x3C003800; red.global.add.noftz.f16x2 [%d0+16], %r1;
    mov.b32 %r1, 0x3F803F00; red.global.add.noftz.bf16x2 [%d0+20], %r1; cvt.rn.f64.u32 %d3, %r0; red.global.add.f64 [%d0+24], %d3;"""
    out = torch.zeros(32, dtype=torch.uint8)
    run(body, out)
    assert out[:4].view(torch.float32).item() == out[24:].view(torch.float64).item() == 496
    assert out[8:16].view(torch.int64).item() == 496 << 33
    assert out[16:20].view(torch.float16).tolist() == out[20:24].view(torch.bfloat16).tolist() == [16, 32]


def test_warps_exchange_as_the_oracle_says() -> None:
    rng, n = random.Random(5), 32
    for kind in ("up", "down", "bfly", "idx"):
        for clamp in (0, 31, 0x1F00, 0x181F, 0x1007, 0x1C00):
            columns = [[rng.getrandbits(32) >> 1 for _ in range(n)], [rng.randrange(40) for _ in range(n)]]
            body = f"""ld.global.u32 %r1, [%d10]; ld.global.u32 %r2, [%d10+128];
            shfl.sync.{kind}.b32 %r3|%p1, %r1, %r2, {clamp}, -1; selp.u32 %r4, 1, 0, %p1;
            st.global.u32 [%d1], %r3; st.global.u32 [%d1+128], %r4;"""
            got = run(body, words(64), torch.tensor(columns, dtype=torch.int32))
            assert [got[:32], got[32:]] == list(shuffled(kind, *columns, [clamp] * 32)), (kind, clamp)
    values = [rng.choice([3, 5, 5, 1 << 30]) for _ in range(n)]
    source = torch.tensor(values, dtype=torch.int32)
    for members in (-1, 0x0F0FF00F, 4):
        lanes = members & 0xFFFFFFFF
        inside = f"mov.u32 %r9, {lanes}; shr.u32 %r8, %r9, %r0; and.b32 %r8, %r8, 1; setp.eq.u32 %p9, %r8, 0; @%p9 ret;"
        load = inside + "ld.global.u32 %r1, [%d10]; setp.eq.u32 %p1, %r1, 5;"
        running = [t for t in range(32) if lanes >> t & 1]

        def of(body: str, load: str = load, running: list[int] = running) -> list[int]:
            got = run(f"{load} {body} st.global.u32 [%d1], %r3;", words(), source)
            return [got[t] & 0xFFFFFFFF for t in running]

        fives = [int(v == 5) for v in values]
        for kind in ("all", "any", "uni"):
            for votes, predicate in ((fives, "%p1"), ([1] * 32, "%p3")):
                body = f"setp.ne.u32 %p3, %r1, 7; vote.sync.{kind}.pred %p2, {predicate}, %r9; selp.u32 %r3, 1, 0, %p2;"
                assert of(body) == [voted(kind, votes, lanes)] * len(running)
        assert of("vote.sync.ballot.b32 %r3, !%p1, %r9;") == [voted("ballot", [1 - v for v in fives], lanes)] * len(
            running
        )
        masks, _ = matched("any", values, lanes)
        assert of("match.any.sync.b32 %r3, %r1, %r9;") == [masks[t] for t in running]
        masks, same = matched("all", values, lanes)
        assert of("match.all.sync.b32 %r3|%p3, %r1, %r9; @%p3 xor.b32 %r3, %r3, 1;") == [
            masks[t] ^ same for t in running
        ]
        for name, kind in [
            ("add", "u32"),
            ("add", "s32"),
            ("min", "u32"),
            ("max", "s32"),
            ("and", "b32"),
            ("or", "b32"),
            ("xor", "b32"),
        ]:
            moved = "sub.u32 %r1, 4, %r1;" if kind == "s32" else ""
            wanted = reduced(name, kind, [4 - v & 0xFFFFFFFF for v in values] if moved else values, lanes)
            assert of(f"{moved} redux.sync.{name}.{kind} %r3, %r1, %r9;") == [wanted] * len(running), (
                name,
                kind,
                members,
            )
        elected = of("mov.u32 %r3, 0; elect.sync %r4|%p2, %r9; selp.u32 %r3, 64, 0, %p2; add.u32 %r3, %r3, %r4;")
        assert elected == [running[0] + 64 * (t == running[0]) for t in running]


@pytest.mark.parametrize("tables", [range(0, 256, 17), pytest.param(range(256), marks=pytest.mark.slow)])
def test_lop3_has_every_table(tables: range) -> None:
    x, y, z = 0x0F0F3355, 0x12345678, 0xFEDC3210
    body = "".join(
        f"lop3.b32 %r1, {x}, {y}, {z}, {table}; @!%p0 st.global.u32 [%d0+{4 * table}], %r1;" for table in tables
    )
    got = run("setp.ne.u32 %p0, %r0, 0;" + body, words(256))
    assert [got[table] & 0xFFFFFFFF for table in tables] == [logic(table, x, y, z) for table in tables]


# Memory


def test_local_memory_belongs_to_the_thread() -> None:
    body = """
    .local .align 8 .b8 stack[64]; mov.u64 %d2, stack; and.b32 %r1, %r0, 7; mul.wide.u32 %d3, %r1, 8; add.u64 %d3, %d3, %d2;
    st.local.v2.u32 [%d3], {%r0, %r1}; cvta.local.u64 %d4, %d3; ld.u32 %r2, [%d4]; ld.local.u32 %r3, [%d3+4];
    isspacep.local %p0, %d4; isspacep.shared %p1, %d4; isspacep.global %p2, %d0; cvta.to.local.u64 %d5, %d4;
    setp.eq.and.u64 %p0, %d5, %d3, %p0; @!%p0 mov.u32 %r2, 9999; @%p1 mov.u32 %r2, 9998; @!%p2 mov.u32 %r2, 9997;
    mad.lo.u32 %r2, %r3, 100, %r2; st.global.u32 [%d1], %r2;"""
    assert run(body, words()) == [t + 100 * (t & 7) for t in range(32)]


def test_generic_addresses_reach_shared_and_global_memory() -> None:
    body = """
    mov.u64 %d2, buffer; cvta.shared.u64 %d3, %d2; add.u64 %d4, %d3, %d8; st.u32 [%d4], %r0; bar.sync 0;
    xor.b32 %r1, %r0, 5; mul.wide.u32 %d5, %r1, 4; add.u64 %d5, %d5, %d3; ld.u32 %r2, [%d5]; cvta.to.shared.u64 %d6, %d5;
    cvt.u32.u64 %r3, %d6; ld.shared.u32 %r4, [%r3]; add.u32 %r2, %r2, %r4; cvta.to.global.u64 %d7, %d1; st.u32 [%d7], %r2;"""
    assert run(body, words(), module=".shared .b32 pad[3]; .shared .b32 buffer[32];") == [
        2 * (t ^ 5) for t in range(32)
    ]


def test_loads_and_stores_of_every_width() -> None:
    source = torch.tensor([0x80, 0xFF, 0x7F, 0x01, *range(0xF0, 0x100), *range(12)], dtype=torch.uint8)
    raw = bytes(source.tolist())
    for kind in ("u8", "s8", "b8", "u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64"):
        size = int(kind[1:]) // 8
        for register, width in (("%h1", 2), ("%r1", 4), ("%d2", 8)):
            if width < size:
                continue
            out = torch.zeros(16, dtype=torch.uint8)
            run(f"ld.global.{kind} {register}, [%d9+{size}]; st.global.b{8 * width} [%d0], {register};"
                f"st.global.{kind} [%d0+8], {register};", out, source)  # fmt: skip
            code = int.from_bytes(raw[size : 2 * size], "little", signed=kind[0] == "s") & (1 << 8 * width) - 1
            assert int.from_bytes(bytes(out[:8].tolist()), "little") == code, (kind, register)
            assert bytes(out[8:].tolist()) == raw[size : 2 * size] + bytes(8 - size)
    body = """ld.global.v4.u8 {%h1, %h2, %h3, %h4}, [%d9]; st.global.v4.u8 [%d0], {%h4, %h3, %h2, %h1};
    ld.global.v2.b64 {%d2, %d3}, [%d9+16]; st.global.v2.b64 [%d0+16], {%d3, %d2}; ld.global.v4.b32 {%r1, _, %r3, %r4}, [%d9+16];
    st.global.v2.u32 [%d0+8], {%r4, %r1};"""
    out = torch.zeros(32, dtype=torch.uint8)
    run(body, out, source)
    assert bytes(out.tolist()) == raw[3::-1] + bytes(4) + raw[28:32] + raw[16:20] + raw[24:32] + raw[16:24]


def test_device_functions_are_called_twice() -> None:
    module = """.func (.param .b32 result) times(.param .b32 a, .param .b32 b) {
    .reg .b32 %r<4>; .reg .pred %p; ld.param.b32 %r1, [a]; ld.param.b32 %r2, [b]; setp.gt.u32 %p, %r1, 9; @%p bra $LARGE;
    mul.lo.u32 %r3, %r1, %r2; st.param.b32 [result], %r3; ret; $LARGE: st.param.b32 [result], %r2; ret; }"""
    call = """{{ .param .b32 pa; .param .b32 pb; .param .b32 pr; st.param.b32 [pa], {a}; st.param.b32 [pb], {b};
    call.uni (pr), times, (pa, pb); ld.param.b32 %r5, [pr]; }}"""
    body = (
        call.format(a="%r0", b="7")
        + "add.u32 %r6, %r5, 1;"
        + call.format(a="%r6", b="%r0")
        + "st.global.u32 [%d1], %r5;"
    )

    def times(a: int, b: int) -> int:
        return b if a > 9 else a * b

    assert run(body, words(), module=module) == [times(times(t, 7) + 1, t) for t in range(32)]


def test_grids_and_blocks_have_three_dimensions() -> None:
    body = """
    mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z; mov.u32 %r3, %ntid.x; mov.u32 %r4, %ntid.y; mov.u32 %r5, %ntid.z;
    mad.lo.u32 %r6, %r2, %r4, %r1; mad.lo.u32 %r6, %r6, %r3, %r0; mul.lo.u32 %r7, %r3, %r4; mul.lo.u32 %r7, %r7, %r5;
    mov.u32 %r8, %ctaid.x; mov.u32 %r9, %ctaid.y; mov.u32 %r10, %ctaid.z; mov.u32 %r11, %nctaid.x; mov.u32 %r12, %nctaid.y;
    mad.lo.u32 %r13, %r10, %r12, %r9; mad.lo.u32 %r13, %r13, %r11, %r8; mad.lo.u32 %r13, %r13, %r7, %r6;
    mul.wide.u32 %d2, %r13, 4; add.u64 %d2, %d2, %d0; mov.u32 %r14, %laneid; shl.b32 %r15, %r9, 8; or.b32 %r14, %r14, %r15;
    st.global.u32 [%d2], %r14;"""
    got = run(body, words(2 * 3 * 4 * 45), threads=(3, 5, 3), grid=(2, 3, 4))
    assert got == [i % 45 % 32 | (i // 45 // 2 % 3) << 8 for i in range(1080)]


def test_dynamic_shared_memory_lies_behind_the_static() -> None:
    body = """
    mov.u32 %r1, dynamic; mov.u32 %r2, fixed; sub.u32 %r3, %r1, %r2; mov.u32 %r4, %dynamic_smem_size; st.shared.u32 [%r1+{last}], %r0;
    st.global.u32 [%d0], %r3; st.global.u32 [%d0+4], %r4;"""
    module = ".shared .b8 fixed[20]; .extern .shared .align 16 .b8 dynamic[];"
    one = (1, 1, 1)
    assert run(body.format(last=44), words(2), module=module, shared_bytes=48, threads=one)[1] == 48
    with pytest.raises(ArgumentError, match=r"an address is out of range \(byte \d+ of shared memory, which has \d+\)"):
        run(body.format(last=48), words(2), module=module, shared_bytes=48, threads=one)


def test_threads_that_write_different_values_to_one_place() -> None:
    # compilers do so where threads computed one number in two orders: shared memory has the last thread's
    body = (
        "mov.u32 %r1, one; st.shared.u32 [%r1], {what}; bar.sync 0; ld.shared.u32 %r2, [%r1]; st.global.u32 [%d1], %r2;"
    )
    module = ".shared .align 4 .b8 one[4];"
    for what, clashes, last in (("%r0", 31, 31), ("7", 0, 7)):
        out = words()
        text = _HEAD.format(body=body.format(what=what), module=module)
        done = execute(parse(text), "k", (1, 1, 1), (32, 1, 1), [out, out])
        assert done.clashes == clashes and out.tolist() == [last] * 32


# Errors

_ERRORS = {
    "st.global.u32 [%d1+4], %r0;": r"out of range \(element 32 of argument 0 \(x\), which has 32\), thread 31 of block \(0, 0, 0\): st.global.u32",
    "st.global.u32 [%d1+2], %r0;": r"an address is not aligned \(element 0 of argument 0 \(x\), which has 32\), thread 0",
    "ld.global.v2.u32 {%r1, %r2}, [%d1];": "an address is not aligned .element 1 .*thread 1 of block",
    "st.global.u32 [%d0], %r0;": r"two threads write different values to one place \(element 0 of argument 0 \(x\)",
    "setp.eq.u32 %p0, %r0, 3; @%p0 bra WAIT; bar.sync 0; ret; WAIT: bar.sync 1; bar.sync 0; trap;": "threads wait at a barrier to which the others never come, thread .*bar.sync",
    "setp.eq.u32 %p0, %r0, 7; @%p0 trap;": r"the kernel stopped at a trap or a failed assertion, thread 7 of block \(0, 0, 0\): .*trap",
    "\n.loc 1 44 2\nfrob.u32 %r1, %r2;\n": r"frob.u32 is not an instruction that fmtsim runs: frob.u32 %r1, %r2; in line \d+ of the PTX \(kernels.py:44\)",
    "add.f32.fast %f1, %f2, %f3;": "add.f32.fast is not an instruction that fmtsim runs",
    "add.u32 %r1, %r2, %r77;": "register %r77 is not declared: add.u32",
    "bra NOWHERE;": "label NOWHERE is not declared: bra NOWHERE",
    "mov.u64 %d2, nothing;": "nothing is not declared",
    "add.u32 %r1, %r2;": r"1 operands; add.u32 has 2",
    "ld.global.v2.u32 {%r1}, [%d1];": "1 registers for 2 numbers",
    "{ .reg .b64 fp; mov.u64 fp, 0; call fp, (), proto; }": "has no body here",
}  # fmt: skip


@pytest.mark.parametrize("body", _ERRORS)
def test_errors_name_the_place_and_the_instruction(body: str) -> None:
    with pytest.raises(ArgumentError, match=_ERRORS[body]):
        run(body, words(), module='.file 1 "/x/kernels.py"')
