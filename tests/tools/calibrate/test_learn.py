# SPDX-License-Identifier: Apache-2.0
"""Learning what cuBLASLt chooses: the questions, the command, and how it ends early."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from fmtsim.gemm.targets.learned import SMALL_BATCH, Learned
from fmtsim.gemm.targets.planfile import Book, Family
from fmtsim.gemm.targets.question import Choice, Question, library_question, question_call
from fmtsim.lab.cli.main import BAD_INPUT
from fmtsim.support.errors import ArgumentError, DeviceError
from fmtsim.support.executors import open_tasks
from tests.support.clusters import slept
from tests.support.cublaslt import chosen, library_file, open_stand_in
from tests.support.refusals import refused
from tools.calibrate import __main__ as calibration
from tools.calibrate import grow, learn
from tools.calibrate.__main__ import main
from tools.calibrate.book_writer import book_bytes
from tools.calibrate.grow import Nodes, Topic
from tools.calibrate.learn import SMALL, TOPICS, answers_file, book_answers, draw

BF16 = next(topic for topic in TOPICS if topic.kinds[0].a == "bf16" and not topic.batched)


@pytest.mark.parametrize("topic", (*TOPICS, *SMALL), ids=lambda topic: f"{topic.kinds[0]} {topic.batched} {topic.most}")
def test_questions_are_calls_that_torch_makes(topic):
    asked = draw(topic, 3000, 5)
    assert np.array_equal(asked, draw(topic, 3000, 5)) and not np.array_equal(
        asked[:, :99], draw(topic, 3000, 6)[:, :99]
    )
    assert len(np.unique(asked, axis=1).T) == asked.shape[1] > 2000  # none twice
    kind, layout, m, n, k, batch = asked
    assert set(kind.tolist()) == set(range(len(topic.kinds))) and asked[1:].min() == 0 and asked[2:].min() == 1
    assert (batch > 1).all() if topic.batched else (batch == 1).all()
    assert not topic.most or (asked[2:5].max() <= topic.most and batch.max() <= SMALL_BATCH)
    assert max((m * n * batch).max(), (n * k * batch).max(), (m * k * batch).max()) <= 1 << 33
    for number, *rest in asked[:, ::20].T.tolist():
        question = Question(topic.kinds[number], *rest)
        call = question_call(question)
        batch_of_one = replace(call, operation="bmm") if call.operation == "mm" else call
        assert question in (library_question(call), library_question(batch_of_one))
    if topic.kinds[0].scaling != "none":
        assert ((k > 5120) & (m * n <= 1 << 17)).mean() > 0.35


def test_topics_have_every_kind_once():
    kinds = [(kind, topic.batched) for topic in TOPICS for kind in topic.kinds]
    assert len(kinds) == len(set(kinds)) and sum(batched for _, batched in kinds) == 7


def one_leaf(columns, labels, leaves):
    """Say the commonest answer: a stand-in for scikit-learn."""
    none = np.full(1, -1)
    return Nodes(np.zeros(1, int), np.zeros(1, np.float32), none, none, np.bincount(labels).argmax(keepdims=True))


@pytest.fixture
def card(monkeypatch):
    """A machine with a GPU of compute capability 9.0, the stand-in, and one topic."""

    class GPU:
        name, library, device = "NVIDIA H250", "NVIDIA H250, cuBLASLt 1.2.3", torch.device("cuda", 0)

    opened = partial(open_stand_in, library_file())
    monkeypatch.setattr(grow, "branches", one_leaf)
    monkeypatch.setattr(calibration, "check_learner", lambda: None)
    monkeypatch.setattr(learn, "check_learner", lambda: None)
    monkeypatch.setattr(calibration, "TOPICS", [BF16, BF16._replace(share=0.5)])
    monkeypatch.setattr(calibration, "open_gpu", lambda device: GPU)
    monkeypatch.setattr(calibration, "open_asker", lambda index, cached: opened())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


WORDS = ["--learn", "a.trees", "--questions", "400", "--workers", "1"]


def test_the_command_writes_trees(card, tmp_path, monkeypatch, capsys):
    """On a GPU of unknown orders, so that choices themselves are compared."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learn, "AT_ONCE", 30)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert main([*WORDS, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    groups = Learned.open("a.trees").groups()
    assert (
        record["bytes"] == os.path.getsize("a.trees")
        and [row["kinds"] for row in record["groups"]] == ["bf16, 1 more"] * 2
    )
    asked = [draw(BF16, count, seed) for seed, count in enumerate((400, 200))]
    for group, questions in zip(groups, asked, strict=True):
        answers = [chosen(Question(BF16.kinds[kind], *rest)) for kind, *rest in questions.T.tolist()]
        answers = [each for each in answers if each is not None]
        assert group.learned + 2 * group.held_out == len(answers) and group.held_out == len(answers) // 4
        (commonest, _), *_ = Counter(answers[: group.learned]).most_common()
        assert group.right == answers[-group.held_out :].count(commonest) > 0
    assert main(WORDS) == 0
    assert "written: a.trees" in capsys.readouterr().out


def test_calls_that_the_library_refuses_have_no_tree(card, tmp_path):
    class NoFP8:
        def answer(self, question):
            return None if question.kind.scaling != "none" else (chosen(question), 15)

    groups = learn.learn(tmp_path / "a.trees", NoFP8, count=100, topics=[TOPICS[-1]._replace(share=1.0), BF16])
    assert [group.kinds for group in groups] == [BF16.kinds]


def test_answers_that_are_kept_are_not_asked_again(card, tmp_path, monkeypatch, capsys):
    """Trees of small sizes grow from a folder without a GPU, and are the same."""
    monkeypatch.chdir(tmp_path)
    topics = [BF16._replace(kinds=BF16.kinds[:1], most=1100)]
    monkeypatch.setattr(calibration, "SMALL", topics)
    words = [*WORDS, "--small", "--answers", str(tmp_path)]
    assert main(words) == 0
    first = (tmp_path / "a.trees").read_bytes()
    assert answers_file(tmp_path, topics[0]).is_file() and Learned.open("a.trees").groups()[0].most == 1100
    monkeypatch.setattr(calibration, "open_card", None)
    monkeypatch.setattr(calibration, "open_asker", None)
    assert main(words) == 0 and (tmp_path / "a.trees").read_bytes() == first
    assert f"answers in {tmp_path}" not in capsys.readouterr().err


def test_answers_of_books_are_about_small_sizes():
    runs = ((1, Choice(66)), (65, Choice(24, 3, 2, 0, 13)), (1153, None))
    family = Family(BF16.kinds[0], 0, "m", (96, 64), runs)
    book = Book(book_bytes([family, family._replace(sizes=(2000, 64))], library="a GPU"), "a book")
    asked, choices = book_answers([book], BF16._replace(kinds=BF16.kinds[:1], most=1100))
    assert len(choices) == asked.shape[1] == learn.OF_A_FAMILY and (asked[3:].T == [96, 64, 1]).all()
    for row, choice in zip(asked.T.tolist(), choices, strict=True):
        assert choice == book.find(Question(BF16.kinds[0], *row[1:]))


def test_too_few_questions(card, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS[:2], "--questions", "30", "--workers", "1"]) == BAD_INPUT
    assert "30 questions are too few to learn from; ask a million or more" in capsys.readouterr().err
    assert not os.path.exists("a.trees")


def test_without_a_learner(monkeypatch):
    monkeypatch.setattr(learn.importlib.util, "find_spec", lambda name: None)
    refused("scikit-learn, which is not installed; pip install scikit-learn", learn.check_learner)


@pytest.mark.slow  # processes import torch
def test_a_dead_process_is_said_and_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(learn, "check_learner", lambda: None)
    path = tmp_path / "a.trees"
    with pytest.raises(DeviceError, match="died, from lack of memory perhaps; nothing was written.*fewer --questions"):
        learn.learn(path, partial(os._exit, 3), count=100, topics=[Topic(BF16.kinds)], workers=2)
    assert not path.exists()


@pytest.mark.slow  # processes import torch
@pytest.mark.parametrize("error", [KeyboardInterrupt, ArgumentError("anything")])
def test_work_under_way_is_not_waited_for(error):
    begin = time.monotonic()
    with (
        pytest.raises(type(error) if isinstance(error, Exception) else error),
        open_tasks(None, workers=2) as tasks,
    ):
        long = tasks.submit(slept, 600)
        while not long.running():
            time.sleep(0.01)
        raise error
    assert time.monotonic() - begin < 60


@pytest.mark.slow  # a process that imports torch
def test_ctrl_c_ends_growing_trees(tmp_path):
    """A terminal's Ctrl-C reaches all processes while a tree grows: all are gone soon, and one line is said."""
    package = tmp_path / "sklearn"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tree.py").write_text("import os, time\nopen('growing', 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, torch\nfrom functools import partial\nfrom tools.calibrate import learn\n"
        "from tools.calibrate import __main__ as calibration\nfrom tools.calibrate.__main__ import main\n"
        "from tests.support.cublaslt import library_file, open_stand_in\n"
        "class GPU: library, device = 'a GPU', torch.device('cuda', 0)\n"
        "if __name__ == '__main__':\n"
        "    calibration.open_gpu = lambda device: GPU\n"
        "    calibration.TOPICS = learn.TOPICS[1:2]\n"
        "    calibration.learn = lambda path, asker, **rest: learn.learn(\n"
        "        path, partial(open_stand_in, library_file()), **rest)\n"
        "    torch.cuda.get_device_capability = lambda device: (9, 0)\n"
        "    sys.exit(main(['--learn', 'a.trees', '--questions', '400', '--workers', '2']))\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.getcwd(), *sys.path])
    process = subprocess.Popen([sys.executable, script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths},
                               start_new_session=True, stderr=subprocess.PIPE, text=True)  # fmt: skip
    end = time.monotonic() + 120
    while not (tmp_path / "growing").exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, said = process.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said
    assert not (tmp_path / "a.trees").exists() and int((tmp_path / "growing").read_text()) != process.pid
