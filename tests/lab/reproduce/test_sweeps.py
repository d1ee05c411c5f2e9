# SPDX-License-Identifier: Apache-2.0
"""What claims count of the runs of a sweep: right answers over all seeds and tasks, spikes, and failed runs."""

import pytest

from fmtsim.lab.reproduce import sweeps
from fmtsim.lab.training.sweep import SweepRun


def run_of(point, losses, tasks=None, sharp=0.0):
    return SweepRun(
        point=point, parameters=1, tokens=1, losses=tuple(losses), validation=losses[-1], tasks=tasks or {},
        sharpness=((3, sharp),),
    )  # fmt: skip


def test_answers_are_pooled_over_seeds_and_tasks(monkeypatch):
    def train(config, point, corpus):
        assert corpus.tasks and config.batch_size == 4
        good = 3 if point.scheme == "bf16" else 1
        spike = [9.0] if point.scheme == "te_delayed" and point.seed else [2.0]
        tasks = {"sums": (good, 10), "copies": (point.seed, 30)}
        return run_of(point, [2.0, 2.1] * 15 + spike + [2.0] * 5, tasks)

    monkeypatch.setattr(sweeps, "train_point", train)
    how = {"lr": 1e-3, "width": 16, "steps": 36, "batch": 4, "seeds": (0, 1)}
    found = sweeps.tasks(lambda part: None, schemes=("bf16", "te_delayed"), **how).numbers
    assert found["bf16, right answers, %"] == 100 * (3 + 3 + 1) / 80
    assert found["right answers less in FP8, points"] == pytest.approx(100 * 4 / 80)
    assert (found["bf16, spikes"], found["te_delayed, spikes"], found["spikes more in FP8"]) == (0, 1, 1)


def test_failed_runs_are_counted_by_scheme_and_sharpness_foretells_them(monkeypatch):
    def train(config, point, corpus):
        assert config.clip is None and config.final_rate == 1
        fails = point.scheme == "e5m7" and point.seed == 1
        return run_of(point, [5.0] * 10 if fails else [1.0] * 10, sharp=2.0 if fails else 1.0)

    monkeypatch.setattr(sweeps, "train_point", train)
    how = {"rates": (1e-3, 2e-3), "width": 16, "steps": 10, "seeds": (0, 1)}
    found = sweeps.fewer_bits(lambda part: None, schemes=("bf16", "e5m7"), **how).numbers
    assert (found["bf16, failed runs in %"], found["e5m7 less bf16, failed runs, points"]) == (0, 50)
    assert (found["area of sharpness"], found["area of learning rate"]) == (1, 0.5)
    assert found["area of sharpness less the rate's"] == 0.5
