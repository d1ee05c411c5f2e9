# SPDX-License-Identifier: Apache-2.0
"""States that are saved, loaded, converted, refused and measured."""

import copy
import io
import pickle

import pytest
import torch

import fmtsim
from fmtsim.optim import codec, stepping
from fmtsim.spec.optimizer import KINDS, key_of
from fmtsim.support.errors import ArgumentError
from tests.optim.optim_samples import gradients, parameter
from tests.support.refusals import refused

SHAPES = ((33, 256), (17,), (4, 40))
STEPS = 5
SCHEMES = [(name, "Madam" if name == "lns_madam" else "AdamW") for name in fmtsim.optim.list_schemes()]
MORE = [("bnb8", "Lion"), ("coat", "SGD"), ("int8_weights", "SGD"), ("fp32", "Madam"), ("lns_madam", "AdamW")]


class Training:
    """Three tensors, their optimizer and gradients that depend on the step alone."""

    def __init__(self, scheme, cls, seed=5, **options):
        self.parameters = [torch.nn.Parameter(torch.from_numpy(parameter(shape, i))) for i, shape in enumerate(SHAPES)]
        if scheme == "bf16_sr":
            self.parameters = [torch.nn.Parameter(p.detach().to(torch.bfloat16)) for p in self.parameters]
        self.optimizer = getattr(fmtsim.optim, cls)(self.parameters, lr=1 / 128, state=scheme, seed=seed, **options)

    def steps(self, first, last):
        for step in range(first, last):
            for i, p in enumerate(self.parameters):
                g = gradients((8448,), 1, 100 * step + i)[0][: p.numel()].reshape(p.shape)
                p.grad = torch.from_numpy(g.copy()).to(p.dtype)
            self.optimizer.step()
        return self

    def bits(self):
        tensors = [p.detach() for p in self.parameters]
        for p in self.parameters:
            tensors += [value for value in self.optimizer.state[p].values() if isinstance(value, torch.Tensor)]
        return [t.clone().view(torch.uint8) if t.dim() else t.clone() for t in tensors]

    def equals(self, other):
        return all(torch.equal(a, b) for a, b in zip(self.bits(), other.bits(), strict=True))


@pytest.mark.parametrize(("scheme", "cls"), SCHEMES + MORE)
def test_states_keep_their_memory(scheme, cls):
    training = Training(scheme, cls).steps(0, 1)
    states = [training.optimizer.state[p] for p in training.parameters]
    places = [{name: x.data_ptr() for name, x in state.items() if isinstance(x, torch.Tensor)} for state in states]
    training.steps(1, 3)
    for state, place in zip(states, places, strict=True):
        assert {name: x.data_ptr() for name, x in state.items() if isinstance(x, torch.Tensor)} == place


@pytest.mark.parametrize(("scheme", "cls"), SCHEMES + MORE)
def test_training_resumes_after_any_step_bit_for_bit(scheme, cls):
    whole = Training(scheme, cls).steps(0, STEPS)
    interrupted = Training(scheme, cls)
    for step in range(STEPS):
        interrupted.steps(step, step + 1)
        file = io.BytesIO()
        torch.save((interrupted.parameters, interrupted.optimizer.state_dict()), file)
        file.seek(0)
        parameters, state = torch.load(file, weights_only=True)
        fresh = Training(scheme, cls, seed=99)
        for p, q in zip(fresh.parameters, parameters, strict=True):
            p.data.copy_(q)
        fresh.optimizer.load_state_dict(state)
        interrupted = fresh
    assert interrupted.equals(whole)


@pytest.mark.parametrize("scheme", ["bf16_sr", "int8_weights"])
def test_random_words_come_from_seed_step_and_parameter_alone(scheme):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Training(scheme, "AdamW").steps(0, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.equals(Training(scheme, "AdamW").steps(0, 2))
    assert not first.equals(Training(scheme, "AdamW", seed=6).steps(0, 2))
    keys = {key_of(5, step, index, kind) for step in range(4) for index in range(4) for kind in KINDS}
    assert len(keys) == 48


@pytest.mark.parametrize(("scheme", "cls"), [("bnb8", "AdamW"), ("lns_madam", "Madam"), ("coat", "SGD")])
def test_copies_train_on_alike(scheme, cls):
    first = Training(scheme, cls).steps(0, 2)
    second, third = copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    first.steps(2, 4)
    assert second.steps(2, 4).equals(first)
    assert third.steps(2, 4).equals(first)


def test_what_schedulers_keep_is_saved_too():
    first, second = Training("bnb8", "AdamW"), Training("bnb8", "AdamW")
    torch.optim.lr_scheduler.LambdaLR(first.optimizer, lambda step: 0.5)
    told = []
    second.optimizer.register_load_state_dict_post_hook(told.append)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert told == [second.optimizer]
    torch.optim.lr_scheduler.LambdaLR(second.optimizer, lambda step: 0.5, last_epoch=3)  # needs initial_lr
    assert second.optimizer.param_groups[0]["initial_lr"] == 1 / 128


def test_another_schemes_state_is_refused_and_nothing_changes():
    state = Training("coat", "AdamW").steps(0, 2).optimizer.state_dict()
    target = Training("bnb8", "AdamW").steps(0, 1)
    before = target.bits()
    refused(r"kept as 'coat', the optimizer's as 'bnb8'; pass convert=True", target.optimizer.load_state_dict, state)
    with pytest.raises(ArgumentError, match=r"one of torch\.optim, the optimizer keeps 'bnb8'; pass convert=True"):
        target.optimizer.load_state_dict(torch.optim.AdamW(target.parameters).state_dict())
    with pytest.raises(ArgumentError, match=r"rule 'adamw', the optimizer's is 'adam'"):
        Training("coat", "Adam").optimizer.load_state_dict(state)
    state["fmtsim"]["record"] = state["fmtsim"]["record"].replace("Scheme(", "Scheme(layout=1, ")  # an earlier fmtsim's
    for convert in (False, True):
        with pytest.raises(
            ArgumentError, match=r"a 'coat' that is neither .*; pass that record as .*state=, or load the"
        ):
            target.optimizer.load_state_dict(state, convert=convert)
    assert all(torch.equal(a, b) for a, b in zip(before, target.bits(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["state"][2].update(first=s["state"][2]["first"][:-1]), "parameter 2: first is torch.float32"),
        (
            lambda s: s["state"][0].update(second_scale=s["state"][0]["second_scale"].double()),
            "second_scale is torch.f",
        ),
        (lambda s: s["state"][1].pop("step"), r"parameter 1: the state has \['first'"),
        (lambda s: s["state"][1].update(shape=[1, 17]), r"parameter 1 is \[17\], its state is of \[1, 17\]"),
        (
            lambda s: s["param_groups"][0]["params"].pop(),
            r"of groups of \[2\] parameters, the optimizer has groups of \[3\]",
        ),
        (lambda s: s["param_groups"][0].update(lr=-1.0), "lr=-1.0 is not allowed"),
        (lambda s: s["fmtsim"].update(version=9), "version 9"),
        (lambda s: s["fmtsim"].update(record="Scheme(name='bnb8', ...)"), "a 'bnb8' that is neither"),
        (lambda s: s.pop("state"), "has no 'state'"),
        (lambda s: s.pop("param_groups"), "has no 'param_groups'"),
        (lambda s: s["param_groups"][0].pop("params"), "a group of the state has no 'params'"),
        (lambda s: s["param_groups"][0].update(params=["0"]), "has 'params': .'0'.; it should be"),
    ],
)
def test_a_broken_state_changes_nothing(change, message):
    state = copy.deepcopy(Training("bnb8", "AdamW").steps(0, 2).optimizer.state_dict())
    change(state)
    target = Training("bnb8", "AdamW").steps(0, 1)
    before, groups = target.bits(), copy.deepcopy(target.optimizer.state_dict()["param_groups"])
    refused(message, target.optimizer.load_state_dict, state)
    assert all(torch.equal(a, b) for a, b in zip(before, target.bits(), strict=True))
    assert target.optimizer.state_dict()["param_groups"] == groups


@pytest.mark.parametrize(("source", "target"), [("bnb8", "coat"), ("fp32", "fp8lm"), ("fp8lm", "int8_weights")])
def test_conversion_decodes_and_encodes(source, target):
    first, second = Training(source, "AdamW").steps(0, 3), Training(target, "AdamW")
    for p, q in zip(second.parameters, first.parameters, strict=True):
        p.data.copy_(q)
    second.optimizer.load_state_dict(first.optimizer.state_dict(), convert=True)
    for p, q in zip(second.parameters, first.parameters, strict=True):
        new, old = second.optimizer.state[p], first.optimizer.state[q]
        formats = [s.optimizer.scheme.formats(tuple(p.shape), ("first", "second")) for s in (first, second)]
        assert new["step"] == 3
        for slot in ("first", "second"):
            number = codec.decode(stepping.parts_of(old, slot), formats[0][slot], tuple(p.shape))
            wanted = codec.encode(number.contiguous(), formats[1][slot], {}, None)
            for name, tensor in wanted.items():
                assert torch.equal(stepping.parts_of(new, slot)[name].view(-1), tensor.view(-1)), (slot, name)
    second.steps(3, 4)


def test_conversion_from_torch():
    ours = Training("bnb8", "AdamW")
    theirs = torch.optim.AdamW(ours.parameters, lr=1 / 128)
    for p in ours.parameters:
        p.grad = torch.ones_like(p)
    theirs.step()
    ours.optimizer.load_state_dict(theirs.state_dict(), convert=True)
    p = ours.parameters[0]
    state = ours.optimizer.state[p]
    assert state["step"] == 1
    fmt = ours.optimizer.scheme.first
    assert torch.allclose(codec.decode(stepping.parts_of(state, "first"), fmt, p.shape), theirs.state[p]["exp_avg"])
    for change, message in (
        (lambda s: s.pop("exp_avg_sq"), r"parameter 0: the state has \[.*none of \('exp_avg_sq',\)"),
        (
            lambda s: s.update(exp_avg_sq=torch.ones(1, *p.shape)),
            rf"parameter 0 is .*, its state is of \[1, {p.shape[0]}",
        ),
        (lambda s: s.pop("step"), "parameter 0: the state does not say its step; it cannot be converted"),
    ):
        broken = copy.deepcopy(theirs.state_dict())
        change(broken["state"][0])
        refused(message, ours.optimizer.load_state_dict, broken, convert=True)
    coat = Training("coat", "AdamW").steps(0, 1).optimizer.state_dict()
    coat["state"][0]["shape"] = [1, *p.shape]
    refused("parameter 0 is .*, its state is of", ours.optimizer.load_state_dict, coat, convert=True)


def test_weights_kept_are_refreshed_on_request():
    training = Training("fp8lm", "AdamW").steps(0, 1)
    p = training.parameters[0]
    p.data.fill_(0.75)
    training.optimizer.refresh_weights()
    kept = codec.decode(
        stepping.parts_of(training.optimizer.state[p], "weights"), training.optimizer.scheme.weights, p.shape
    )
    assert torch.equal(kept, p.detach())


@pytest.mark.parametrize(("scheme", "cls"), SCHEMES)
def test_parameters_of_any_shape(scheme, cls):
    """Scalars, nothing at all, and layouts other than rows in order."""
    scalar, nothing = torch.nn.Parameter(torch.tensor(0.5)), torch.nn.Parameter(torch.zeros(0, 7))
    turned = torch.nn.Parameter(torch.from_numpy(parameter((70, 90))).t())
    straight = torch.nn.Parameter(turned.detach().contiguous())
    for p in (scalar, nothing, turned, straight):
        p.grad = torch.full_like(p, 0.5)
    make = getattr(fmtsim.optim, cls)
    make([scalar, nothing], state=scheme, lr=0.25).step()
    assert float(scalar.detach()) != 0.5
    for p in (turned, straight):  # one optimizer each: the same place among parameters
        make([p], state=scheme).step()
    assert torch.equal(turned.detach(), straight.detach())


def test_shards_of_distributed_parameters():
    """A shard that is the whole parameter trains like the parameter, and its state is that of a plain tensor."""
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain, sharded = Training("bnb8", "AdamW"), Training("bnb8", "AdamW")
        shards = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in sharded.parameters]
        optimizer = fmtsim.optim.AdamW(shards, lr=1 / 128, state="bnb8", seed=5)
        for step in range(3):
            plain.steps(step, step + 1)
            for p, q in zip(shards, plain.parameters, strict=True):
                p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert isinstance(shards[0], DTensor)
        for p, q in zip(shards, plain.parameters, strict=True):
            assert torch.equal(p.detach().to_local(), q.detach())
            assert torch.equal(optimizer.state[p]["first"], plain.optimizer.state[q]["first"])
        assert fmtsim.optim.memory(optimizer).measured == fmtsim.optim.memory(plain.optimizer).measured
    finally:
        destroy_process_group()


@pytest.mark.parametrize("state", ["bnb8", "ao_8bit", "ao_fp8"])
def test_second_moments_far_below_the_largest_of_their_block_vanish(state):
    """docs/optim.md warns of it: the sources' own schemes do so."""
    generator, weight = torch.Generator().manual_seed(0), torch.nn.Parameter(torch.zeros(4096))
    optimizer = fmtsim.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, state=state)
    largest = 0.0
    for _ in range(20):
        before = weight.detach().clone()
        weight.grad = torch.randn(4096, generator=generator)
        weight.grad[::2] /= 1000
        optimizer.step()
        largest = max(largest, float((weight.detach() - before)[::2].abs().max()) / 1e-3)
    assert largest > 10_000  # learning rates; 1 with float32 moments
