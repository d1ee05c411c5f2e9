# SPDX-License-Identifier: Apache-2.0
"""What ``simulate`` says of what it does not know, and what it refuses."""

import copy
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch import rms_norm as imported_rms_norm
from torch.nn import functional
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.functional import dropout as imported_dropout
from torch.nn.functional import scaled_dot_product_attention as imported_attention
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.machine import operators, patches
from fmtsim.machine import simulate as module
from fmtsim.support.errors import ArgumentError, CoverageWarning

BF16 = torch.bfloat16


def linear() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(64, 64).bfloat16()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16)


class Net(nn.Module):
    """A convolution inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv1d(1, 1, 3), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return self.block(x)


LIBRARY = torch.library.Library("fmtsim_tests", "FRAGMENT")  # as an operator of C++ registers itself
LIBRARY.define("double(Tensor x) -> Tensor")
LIBRARY.impl("double", lambda x: x * 2, "CPU")
double = torch.ops.fmtsim_tests.double


def nested() -> None:
    with fmtsim.simulate():
        pass


REFUSED = {
    "custom operator": (lambda: double(torch.ones(3)), r"fmtsim_tests\.double is not an operator of PyTorch, and its"),
    "higher-order operator": (
        lambda: flex_attention.flex_attention(*[torch.ones(1, 1, 64, 32)] * 3),
        "flex_attention is not an operator of PyTorch, and its kernel on h200 is not known; run the model without it",
    ),
    "compiled": (
        lambda: torch.compile(nn.Sequential(linear()), backend="eager")(numbers(4, 64)),
        r"runs in compiled code, whose kernels on h200 are the compiler's own; simulate .*\(model\._orig_mod\)",
    ),
    "meta": (
        lambda: linear().to("meta")(torch.ones(2, 64, dtype=BF16, device="meta")),
        r"in the model \(Linear\) has a tensor on meta; simulate computes on the CPU: move model and batch there",
    ),
    "FP8 by an operator": (  # a DtypeError is a TypeError, of which torch would make one of its own
        lambda: numbers(4, 64).to(torch.float8_e5m2) @ numbers(4, 64).to(torch.float8_e5m2).mT,
        "torch.mm does not take torch.float8_e5m2; call fmtsim.scaled_mm, or name a unit as target=",
    ),
    "nested": (nested, "simulate runs inside another simulate; leave one of them out"),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:Using `torch.compile")
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, message = REFUSED[what]
    with pytest.raises(ArgumentError, match=message), fmtsim.simulate():
        call()


def test_other_threads_have_the_host_s_functions():
    """A thread that simulates leaves torch as it is to one that does not, and to one that still simulates."""
    entered, others_done, x = threading.Event(), threading.Event(), numbers(64).half()
    host = functional.dropout, functional.scaled_dot_product_attention, torch.rms_norm, torch.autocast.__init__

    def simulates(run):
        with run:
            entered.set()
            assert others_done.wait(60)
            torch.rms_norm(x, (64,))
            assert x.softmax(0, torch.float32).dtype == torch.float32

    first, second = fmtsim.simulate(strict=True), fmtsim.simulate()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(simulates, first)
        assert entered.wait(60)
        expected = x.float().softmax(0)
        assert torch.equal(x.softmax(0, torch.float32), expected) and functional.dropout(x, 0.5).shape == x.shape
        assert torch.equal(torch.rms_norm(x, (64,)), host[2](x, (64,)))
        assert torch.amp.GradScaler("cuda", enabled=False)._device == "cuda" and first.exact.total() == 0
        with second:  # is left before the first one, which keeps what it needs
            torch.rms_norm(x, (64,))
        others_done.set()
        waiting.result()
    assert first.exact["_fused_rms_norm"] == second.exact["_fused_rms_norm"] == 1
    after = functional.dropout, functional.scaled_dot_product_attention, torch.rms_norm, torch.autocast.__init__
    assert after == host


def host_calls() -> list[torch.Tensor]:
    """Return results of what a simulation forks: softmax, attention, norms, recurrent networks, foreach, autocast."""
    x, mask = numbers(1, 4, 64, 32).float(), torch.eye(64, dtype=torch.bool)
    mask[3] = False  # a row of NaN on the host
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network, weight = nn.GRU(32, 32), nn.Parameter(torch.rand(8))
    weight.grad = weight.detach() * 2
    torch.optim.AdamW([weight]).step()
    results = [x.half().softmax(-1, torch.float32), functional.rms_norm(x, (32,)), network(x[0])[0], weight]
    results += [functional.scaled_dot_product_attention(x, x, x, mask), functional.dropout(x, 0.0)]
    with torch.autocast("cpu"):
        results += [functional.layer_norm(x, (32,)), x @ x.mT, functional.linear(x, x[0, 0]), (x @ x.mT).exp()]
        results += [x.softmax(-1), (x @ x.mT).sum(), functional.mse_loss(x, x + 1), (x @ x.mT).log_softmax(-1)]
    return results


def test_other_threads_compute_what_they_compute_alone():
    entered, others_done, expected = threading.Event(), threading.Event(), host_calls()

    def simulates():
        with fmtsim.simulate(), torch.autocast("cuda"):
            entered.set()
            assert others_done.wait(60)
            return host_calls()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(simulates)
        assert entered.wait(60)
        results = host_calls()
        names = "dropout", "scaled_dot_product_attention"
        assert [getattr(functional, name) for name in names] == [imported_dropout, imported_attention]
        others_done.set()
        inside = waiting.result()
    same, forked = (
        [x.dtype == y.dtype and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(xs, expected, strict=True)]
        for xs in (results, inside)
    )
    assert all(same) and sum(forked) < len(forked) / 2  # a GPU computes most of them otherwise


def test_autocast_around_it_is_refused():
    message = "autocast was entered before simulate, and casts what it does on a CPU; enter it inside"
    with torch.autocast("cpu"), pytest.raises(ArgumentError, match=message), fmtsim.simulate():
        pass


def test_autocast_has_the_lists_of_a_gpu_until_the_simulation_ends():
    policies = [name for names in patches.POLICIES.values() for name in names.split()]
    shared = patches.SHARED.split()
    assert len(set(policies + shared)) == len(policies + shared)
    listed = {name for name in patches.kernels("CUDA") if "imname" not in name and "names_" not in name}
    assert set(policies + shared) == listed - {"rms_norm", "_cudnn_rnn"}  # torch 2.13 casts rms_norm, 2.11 not
    before, x = patches.kernels("CPU"), numbers(4, 64)
    with fmtsim.simulate(), torch.autocast("cuda"):
        assert functional.layer_norm(x, (64,)).dtype == torch.float32
        assert functional.linear(x.float(), x.float()).dtype == torch.float16  # as "cuda" has by default
        with pytest.raises(
            ArgumentError, match="binary_cross_entropy is not computed under autocast on a GPU; use bin"
        ):
            functional.binary_cross_entropy(x.float().sigmoid(), x.float().sigmoid())
    assert patches.kernels("CPU") == before
    with torch.autocast("cpu", dtype=BF16):
        assert functional.layer_norm(x, (64,)).dtype == BF16


def test_strict_names_the_module_and_the_next_step():
    message = (
        r"convolution: forward of .* shapes has it in block\.0 \(Conv1d\): its bits on h200 are not known; put another "
        "operator in its place"
    )
    net = Net()
    with pytest.raises(ArgumentError, match=message), fmtsim.simulate(strict=True):
        net(torch.ones(1, 1, 8))


def test_strict_names_the_node_of_a_backward_pass():
    x = torch.ones(1, 1, 8, requires_grad=True)
    y = Net()(x).sum()
    with (
        pytest.raises(
            ArgumentError, match="convolution_backward: dgrad of .* shapes has it in ConvolutionBackward0: its bits"
        ),
        fmtsim.simulate(strict=True),
    ):
        y.backward()


def test_the_summary_shows_the_worst_first():
    q, k, v = (numbers(1, 1, n, 32).requires_grad_() for n in (64, 400, 400))
    net, a, b = Net(), numbers(63, 64), numbers(64, 127)
    with fmtsim.simulate(target="h100") as run:
        net(torch.ones(1, 1, 8))
        a @ b
        functional.scaled_dot_product_attention(q, k, v).sum().backward()
    total = sum(c.total() for c in (run.exact, run.guess, run.unknown, run.nondeterministic))
    first, *lines = run.summary.splitlines()
    assert first == f"h100: {run.exact.total()} of {total} operators exact"
    assert lines[0] == "no bits to reproduce: the h100's own differ from run to run (1)"
    assert lines[2] == "computed by torch on the host (1)"
    assert lines[3].startswith("  1  convolution: forward of ") and lines[3].endswith("has it in block.0 (Conv1d)")
    assert lines[4] == "by the target's guess (1)"
    assert lines[5].startswith("  1  mm: target h100 has no recorded accumulation order for mm M=63 N=127 K=64")
    assert lines[6].startswith("exact: ")
    assert len(lines) == 7


def test_another_torch_is_named_once(monkeypatch):
    module._check_host.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    text = (
        r"torch 2\.12\.1 may call other operators than torch 2\.11\.0\+cu130, whose bits were recorded; torch 2\.11 and"
    )
    with pytest.warns(CoverageWarning, match=text):
        fmtsim.simulate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fmtsim.simulate()
    with pytest.raises(ArgumentError, match=text + ".*; install one of these, or leave strict=False"):
        fmtsim.simulate(strict=True)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_a_backend_of_attention_is_not_taken_for_cudnn(backend):
    q = numbers(1, 2, 64, 32)
    with sdpa_kernel(backend), fmtsim.simulate() as run:
        functional.scaled_dot_product_attention(q, q, q)
    unknown = " ".join(run.unknown)
    assert ("attention without cuDNN" in unknown) == (backend == SDPBackend.FLASH_ATTENTION)
    assert (run.exact["bmm"] + run.guess.total() > 0) == (backend == SDPBackend.MATH)


def test_functions_that_were_imported_by_name_fork_as_on_the_gpu():
    q, hidden_row = numbers(1, 2, 64, 32), torch.ones(64, 64, dtype=torch.bool)
    hidden_row[3] = False
    calls = (
        (imported_attention, (functional, "scaled_dot_product_attention"), (q, q, q, hidden_row)),
        (imported_dropout, (functional, "dropout"), (q, 0.5, True)),
        (imported_rms_norm, (torch, "rms_norm"), (q, (32,))),
    )
    runs, results = [], []
    for imported, (namespace, name), arguments in calls:
        for by_name in (True, False):
            torch.manual_seed(7)
            with fmtsim.simulate(strict=True) as run:
                results.append((imported if by_name else getattr(namespace, name))(*arguments))
            runs.append(run.exact)
        assert torch.equal(*results[-2:]), name
        assert not results[-1].isnan().any(), name  # where the host's attention has a row of NaN
    assert [set(run) for run in runs[::2]] == [set(run) for run in runs[1::2]]
    assert runs[2]["native_dropout"] == runs[4]["_fused_rms_norm"] == 1
    with fmtsim.simulate() as run:  # dropout inside attention: the host has three operators, the GPU one
        imported_attention(q, q, q, dropout_p=0.5)
        nn.MultiheadAttention(32, 2, dropout=0.5, dtype=q.dtype)(q[0], q[0], q[0], need_weights=False)
    assert {what: n for what, n in run.unknown.items() if "attention" in what} == {
        "scaled_dot_product_attention: attention with dropout": 2
    }


def test_deterministic_algorithms_take_another_attention():
    q = numbers(1, 2, 64, 32)
    try:
        torch.use_deterministic_algorithms(True)
        with (
            pytest.raises(ArgumentError, match="attention under use_deterministic_algorithms"),
            fmtsim.simulate(strict=True),
        ):
            functional.scaled_dot_product_attention(q, q, q)
    finally:
        torch.use_deterministic_algorithms(False)


def test_switches_of_products_act_as_on_the_gpu():
    a, b = torch.linspace(1, 2, 64 * 64).view(2, 32, 64)[0], torch.linspace(1, 3, 64 * 64).view(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = fmtsim.mm(a, b, target="h200", allow="tf32")
        plain = fmtsim.mm(a, b, target="h200")
    try:
        torch.set_float32_matmul_precision("high")
        with fmtsim.simulate():
            y = a @ b
    finally:
        torch.set_float32_matmul_precision("highest")
    assert y.equal(expected) and not y.equal(plain)


def test_reductions_in_float32():
    """Kernels named nvjet add parts in float32 in any case; what others would be is a guess."""
    switches = torch.backends.cuda.matmul
    x, w = numbers(64, 4096).bfloat16(), numbers(256, 4096).bfloat16()
    odd = numbers(64, 1001).bfloat16(), numbers(1001, 63).bfloat16()
    with fmtsim.simulate(strict=True):
        expected = x @ w.t()
    try:
        switches.allow_bf16_reduced_precision_reduction = False
        with fmtsim.simulate(strict=True):
            in_float32 = x @ w.t()
        assert torch.equal(in_float32, expected)
        with pytest.raises(ArgumentError, match="reductions=fp32 has no recorded"), fmtsim.simulate(strict=True):
            odd[0] @ odd[1]
    finally:
        switches.allow_bf16_reduced_precision_reduction = True


def test_a_number_where_another_argument_is_known():
    with fmtsim.simulate() as run:
        y = torch.empty(4)
        torch.tanh(torch.linspace(0, 1, 4), out=y)
        torch.arange(4).exp()
    assert set(run.unknown) == {"linspace: numbers that it makes of integers"}
    assert run.exact["tanh"] == 1


def test_results_in_a_tensor_of_the_caller():
    a, b, c = torch.randn(128, 64).to(BF16), torch.randn(64, 32).to(BF16), torch.randn(128, 32)
    with fmtsim.simulate(target="h100") as run:
        sums = torch.mm(a, b, out_dtype=torch.float32)
        y = torch.empty(128, 32)
        torch.addmm(c, a, b, out_dtype=torch.float32, out=y)
        assert torch.equal(y, sums + c)
        torch.add(y, c, out=y)
        assert torch.equal(y, sums + c + c)
        # in 16 bits a kernel of Hopper rounds the sums first
        z = c.to(BF16)
        assert torch.equal(z.addmm_(a, b), sums.to(BF16) + c.to(BF16))
        assert run.guess.total() == 2
        torch.add(c, c, out=torch.empty(128, 32, dtype=BF16))
    assert set(run.unknown) == {"add: written to out= of another dtype"}


def test_a_tensor_without_dimensions_beside_16_bits():
    x, half, third = torch.randn(64).to(BF16), torch.tensor(0.5), torch.tensor(1 / 3)
    with fmtsim.simulate(target="h100") as run:
        y, z = x * half, x / half
        assert not run.guess
        rounded = x * third
        w = x.clone()
        w *= third
    assert torch.equal(y, (x.float() * 0.5).to(BF16))
    assert torch.equal(z, (x.float() * 2).to(BF16))
    assert torch.equal(rounded, (x.float() * third.to(BF16).float()).to(BF16))
    assert torch.equal(w, rounded)
    assert run.guess.total() == 2


def test_operators_in_place_have_the_bits_of_their_results():
    x = torch.linspace(0.1, 3, 1000).to(BF16)
    for name in ("exp", "tanh", "sigmoid", "rsqrt", "silu", "add", "sub", "div", "pow"):
        arguments = {"add": (x.float(),), "sub": (x,), "div": (3.0,), "pow": (2,)}.get(name, ())
        packet, writer = (getattr(torch.ops.aten, text) for text in (name, f"{name}_"))
        with fmtsim.simulate(strict=True):
            expected, y = packet(x, *arguments), x.clone()
            assert writer(y, *arguments) is y
        assert y.equal(expected.to(BF16)), name
        assert writer in operators.KNOWN


def test_checkpointing_changes_no_bit():
    layer, x = linear(), numbers(32, 64)
    gradients = []
    for reentrant in (None, True, False):
        leaf, model = x.clone().requires_grad_(), copy.deepcopy(layer)

        def call(x, model=model):
            return functional.silu(model(x))

        with fmtsim.simulate(strict=True):
            y = call(leaf) if reentrant is None else checkpoint(call, leaf, use_reentrant=reentrant)
            y.sum().backward()
        gradients.append((leaf.grad, model.weight.grad))
    for dx, dw in gradients[1:]:
        assert dx.equal(gradients[0][0]) and dw.equal(gradients[0][1])


def test_a_power_of_two_scales_no_bit_of_a_step():
    weights = []
    for scale in (1.0, 1024.0):
        model, x = nn.Sequential(linear().float()), numbers(32, 64).float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with fmtsim.simulate() as run:
            for factor in (1.0, float("inf"), 1.0):  # the second step is skipped
                scaler.scale(model(x * factor).square().sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert not run.unknown
        weights.append([p.detach() for p in model.parameters()])
    assert all(a.equal(b) and a.isfinite().all() for a, b in zip(*weights, strict=True))


def test_a_converted_model_multiplies_on_its_own_target():
    model = nn.Sequential(linear(), nn.GELU(), linear())
    converted = fmtsim.convert(model, recipe="te_current", target="h200")
    x = numbers(128, 64)
    plain = converted[0](x)
    with fmtsim.simulate(strict=True) as run:
        y = converted[0](x)
        converted(x)
    assert y.equal(plain)
    assert run.exact["fmtsim.gemm"] == 3 and run.exact["gelu"] == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"target": 3}, r"target=3 cannot be simulated; choose from"),
    ({"strict": "no"}, r"strict='no' is not allowed; pass True or False"),
    ({"strict": torch.ones(2)}, r"strict=tensor.* is not allowed; pass True or False"),
])  # fmt: skip
def test_arguments_of_other_types_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        fmtsim.simulate(**options)


def test_tensors_without_numbers_are_refused():
    x = torch._subclasses.FakeTensorMode().from_tensor(torch.ones(3))
    with (
        fmtsim.simulate(),
        pytest.raises(ArgumentError, match="sin.* has a fake tensor, which has no numbers; pass the"),
    ):
        x.sin()


def test_sparse_tensors_are_computed_as_the_host_does_and_counted_so():
    x = torch.eye(3).to_sparse()
    with fmtsim.simulate() as run:
        y, z = x.sin(), x.clone()
    assert torch.equal(y.to_dense(), x.sin().to_dense()) and torch.equal(z.to_dense(), x.to_dense())
    assert run.unknown == {"sin: sin of sparse or nested tensors": 1}


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: functional.log_softmax(x, -1), (1, 8, 0)), (lambda x: functional.layer_norm(x, (33,)), (0, 33)),
        (lambda x: x.sum(0), (0, 3)), (lambda x: x.mean(), (0,)), (lambda x: x.amax(-1), (0, 4)), (torch.exp, (0,)),
        (lambda x: functional.linear(x, torch.ones(5, 33), torch.ones(5)), (0, 33)),
        (lambda x: functional.rms_norm(x, (33,), torch.ones(33)), (0, 33)), (lambda x: x @ x.mT, (3, 0)),
    ],
)  # fmt: skip
def test_what_has_no_elements_is_what_the_host_makes_of_it(function, shape):
    with fmtsim.simulate(strict=True):
        x = torch.ones(shape, requires_grad=True)
        y = function(x)
        y.sum().backward()
    host = torch.ones(shape, requires_grad=True)
    expected = function(host)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype) and torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(), expected.nan_to_num()) and x.grad.shape == host.shape


def test_softmax_of_one_number_is_one():
    with fmtsim.simulate() as run:
        y = torch.tensor(3.0).softmax(0)
    assert y.item() == 1 and not run.unknown


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("sum", lambda x: x.sum(0)), ("mean", lambda x: x.mean(-1)), ("linalg_vector_norm", lambda x: x.norm()),
        ("_softmax", lambda x: x.softmax(-1)), ("_log_softmax", lambda x: x.log_softmax(-1)),
        ("lerp", lambda x: torch.lerp(x, x * 3, 0.3)), ("addcmul", lambda x: torch.addcmul(x, x, x, value=0.3)),
        ("addcdiv", lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.3)), ("pow", lambda x: x**1.5),
        ("_fused_rms_norm", lambda x: functional.rms_norm(x, (32,), x[0])), ("cumsum", lambda x: x.cumsum(-1)),
        ("nll_loss_forward", lambda x: functional.nll_loss(x, torch.arange(6))),
    ],
)  # fmt: skip
def test_float64_is_the_host_s_and_is_not_called_exact(name, function):
    def run(x):
        y = function(x)
        y.sum().backward()
        return y.detach(), x.grad

    start = torch.rand(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = run(start.clone().requires_grad_())
    with fmtsim.simulate() as simulated:
        results = run(start.clone().requires_grad_())
    for ours, host in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, host, rtol=1e-14, atol=1e-15)  # composed operators add in another order
    assert any(known.startswith(f"{name}: ") for known in simulated.unknown) and name not in simulated.exact


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_the_host_s():
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    with fmtsim.simulate():
        y = x.abs()
    assert [part.tolist() for part in y.unbind()] == [part.tolist() for part in x.unbind()]


def test_rms_norm_of_a_jagged_tensor_is_made_of_torch_s_operators():
    x = torch.nested.nested_tensor([torch.ones(2, 3), 2 * torch.ones(4, 3)], layout=torch.jagged)
    with fmtsim.simulate() as run:
        y = functional.rms_norm(x, (x.shape[-1],))
    torch.testing.assert_close(y.values(), torch.ones(6, 3))  # 1 / sqrt(1 + eps)
    assert run.exact["rsqrt"] == 1 and not run.unknown


def test_a_mask_s_rows_begin_at_multiples_of_eight_elements():
    aligned = torch.zeros(2, 1, 4, 16)
    assert patches._aligned(aligned) is aligned
    for keys in (4, 12):
        mask = torch.arange(2 * 4 * keys, dtype=torch.float32).reshape(2, 1, 4, keys)
        rows = patches._aligned(mask)
        assert torch.equal(rows, mask) and all(stride % 8 == 0 for stride in rows.stride()[:-1])


def test_a_product_is_written_to_out():
    x, w, bias, y, z = numbers(4, 64), numbers(64, 32), numbers(32), numbers(4, 32), numbers(0)
    with fmtsim.simulate(strict=True):
        torch.mm(x, w, out=y)
        torch.addmm(bias, x, w, out=z)
        assert torch.equal(y, x @ w) and torch.equal(z, torch.addmm(bias, x, w))


def test_the_first_operator_does_not_import_torch_s_compiler():
    code = """import sys, torch, fmtsim
with fmtsim.simulate():
    torch.ones(4).tanh()
print('torch._dynamo' in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_derivatives_by_transforms_are_those_of_the_operators():
    func, rms_norm = torch.func, functional.rms_norm
    x, weights, batch = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.0, 2.0]), numbers(4, 3).float()

    def loss(v, w=weights):
        return (rms_norm(v, (3,), w) ** 3).sum()

    def gradient_twice():
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        return torch.autograd.grad(first.sum(), leaf)[0]

    def forward():
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(torch.autograd.forward_ad.make_dual(x, x + 1) * 2).tangent

    calls = {
        "jvp": lambda: func.jvp(lambda v: v * 2, (x,), (x,))[1],
        "forward": forward,
        "jacfwd": lambda: func.jacfwd(lambda v: v * 2)(x),
        "hessian": lambda: func.hessian(lambda v: (v**3).sum())(x),
        "grad": lambda: func.grad(loss)(x),
        "jvp of rms_norm": lambda: func.jvp(lambda v: rms_norm(v, (3,)), (x,), (weights,))[1],
        "jacfwd of rms_norm": lambda: func.jacfwd(lambda v: rms_norm(v, (3,)))(x),
        "jacrev of rms_norm": lambda: func.jacrev(lambda v: rms_norm(v, (3,)))(x),
        "hessian of rms_norm": lambda: func.hessian(loss)(x),
        "samples": lambda: func.vmap(func.grad(loss))(batch),
        "weights of samples": lambda: func.vmap(func.grad(loss, 1), (0, None))(batch, weights),
        "gradient twice": gradient_twice,
    }
    for name, call in calls.items():
        with fmtsim.simulate(strict=True):
            result = call()
        torch.testing.assert_close(result, call(), rtol=1e-4, atol=1e-5, msg=name)


def test_gradients_by_transforms_have_the_bits_of_a_graph_of_gradients():
    x, weight = numbers(4, 8).float(), numbers(8).float()
    results = []
    with fmtsim.simulate(strict=True) as run:
        results.append(torch.func.grad(lambda v: functional.rms_norm(v, (8,), weight).sum())(x))
        leaf = x.clone().requires_grad_()
        results += torch.autograd.grad(functional.rms_norm(leaf, (8,), weight).sum(), leaf, create_graph=True)
    assert torch.equal(*results)
    assert run.exact["_fused_rms_norm"] == 2 and not run.exact["_fused_rms_norm_backward"]
