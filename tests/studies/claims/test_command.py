# SPDX-License-Identifier: Apache-2.0
"""What ``python -m studies.claims`` prints, writes and returns."""

import dataclasses
import json
import sys

import pytest

from fmtsim.support.errors import ArgumentError
from studies.claims import run as run_module
from studies.claims.__main__ import main
from studies.claims.run import CLAIMS


@pytest.fixture
def run(capsys):
    """Run ``python -m studies.claims`` and return its exit code, standard output and standard error."""

    def command(*words: str) -> tuple[int, str, str]:
        status = main([*words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.fixture
def wrong(monkeypatch):
    """Make the claim ``gaudi`` show less than recorded, by scales that do not reach far enough."""

    def change(claim):
        if claim.name != "gaudi":
            return claim
        return dataclasses.replace(claim, settings=tuple((dict(claim.settings) | {"decades": 12.0}).items()))

    monkeypatch.setattr(run_module, "CLAIMS", tuple(map(change, CLAIMS)))


def test_list(run):
    status, text, err = run("--list")
    assert (status, err) == (0, "")
    assert all(claim.name in text for claim in CLAIMS)
    records = json.loads(run("--list", "--json")[1])
    assert [record["name"] for record in records] == [claim.name for claim in CLAIMS]


def test_one_claim(run):
    status, text, err = run("--only", "gaudi")
    assert status == 0
    assert err.startswith("gaudi: shown in part, ")
    header, _, *rows = text.splitlines()
    assert header.split() == ["claim", "number", "compared", "with", "ours", "seeds", "verdict", "seconds"]
    assert [row.split()[0] for row in rows[:3]] == ["gaudi", "power", "16^k,"]
    assert "1 shown in part; nothing is worse than recorded" in text


def test_seeds(run):
    status, text, _ = run("--only", "gaudi", "--seeds", "2", "--quiet", "--json")
    (claim,) = json.loads(text)["claims"]
    assert status == 0 and [len(number["seeds"]) for number in claim["numbers"]] == [2, 2]
    status, _, err = run("--only", "gaudi", "--seeds", "0")
    assert status == 2 and "--seeds 0 runs nothing; choose 1 or more" in err


def test_json_and_markdown(run):
    record = json.loads(run("--only", "gaudi", "--json", "--quiet")[1])
    assert record["worse"] == []
    (claim,) = record["claims"]
    assert (claim["claim"], claim["verdict"], claim["recorded"]) == ("gaudi", "shown in part", "shown in part")
    assert (claim["error"], claim["worse"], claim["numbers"][0]["published"]) == ("", False, None)
    _, text, err = run("--only", "gaudi", "--markdown", "--quiet")
    assert err == ""
    header = "| claim | number | compared with | ours | seeds | verdict | seconds |"
    assert text.startswith(f"{header}\n|---|---|--:|--:|--:|---|--:|\n| gaudi |")
    assert "- **gaudi**: scales of powers of two" in text


def test_a_claim_that_shows_less_is_1(run, wrong):
    status, text, err = run("--only", "gaudi", "--only", "dge")
    assert status == 1
    assert "gaudi: not shown (WORSE than recorded: shown in part)" in err
    assert "1 shown, 1 not shown; WORSE than recorded: gaudi" in text


def test_an_experiment_that_breaks_off_is_3(run, monkeypatch):
    def broken(tell, **settings):
        raise ArgumentError("no such thing")

    claims = tuple(dataclasses.replace(claim, measure=broken) if claim.name == "dge" else claim for claim in CLAIMS)
    monkeypatch.setattr(run_module, "CLAIMS", claims)
    status, text, err = run("--only", "gaudi", "--only", "dge")
    assert status == 3
    assert "dge: BROKE OFF" in err and "broke off: no such thing" in text
    assert "1 shown in part, 1 broke off; WORSE than recorded: dge" in text


def test_a_claim_that_is_not_shown_and_recorded_so_is_0(run):
    status, text, _ = run("--only", "fp8_hardware", "--quiet")
    assert status == 0 and "1 not shown; nothing is worse than recorded" in text


def test_folder(run, tmp_path):
    pytest.importorskip("matplotlib")
    assert run("--only", "gaudi", "--only", "dge", "--out", str(tmp_path / "claims"), "--quiet")[0] == 0
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["claims.json", "claims.md", "dge.png"]
    assert (tmp_path / "claims" / "dge.png").read_bytes().startswith(b"\x89PNG")


def test_folder_without_matplotlib(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run("--only", "dge", "--out", str(tmp_path), "--quiet")
    assert (status, err) == (0, "no plots: matplotlib is not installed (pip install 'fmtsim[viz]')\n")


def test_bad_arguments(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    status, _, err = run("--only", "dge", "--out", str(tmp_path / "file"))
    assert status == 2
    assert "is a file; choose a folder" in err
    status, _, err = run("--only", "gaudy")
    assert status == 2
    assert "unknown claim 'gaudy'; did you mean 'gaudi'" in err
    monkeypatch.setattr(run_module, "CLAIMS", (dataclasses.replace(CLAIMS[0], slow=True),))
    status, _, err = run("--quick")
    assert status == 2
    assert "every claim named with --only is slow; leave --quick out" in err


def test_claims_at_the_size_of_a_card_go_on_in_their_folder(run, monkeypatch, tmp_path):
    sizes = {"schemes": ("bf16", "e8m3"), "rates": (8e-3,), "seeds": (0,), "width": 16, "heads": 2, "steps": 3}
    small = tuple(
        dataclasses.replace(claim, card=tuple(sizes.items()) if claim.name == "fewer_bits" else ()) for claim in CLAIMS
    )
    monkeypatch.setattr(run_module, "CLAIMS", small)
    words = ("--device", "cpu", "--workers", "1", "--json", "--out", str(tmp_path))
    _, text, err = run(*words, "--budget", "1h", "--quiet")
    (claim,) = json.loads(text)["claims"]
    assert (claim["claim"], err) == ("fewer_bits", "") and {"plan.json", "claims.md"} < {
        p.name for p in tmp_path.iterdir()
    }
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "trainings").iterdir()}
    assert len(files) == 2
    next(iter(files)).unlink()
    status, again, err = run(*words, "--budget", "0s")
    (stopped,) = json.loads(again)["claims"]
    assert status == 3 and stopped["error"].startswith("the budget ended before 1 of 2 trainings")
    run(*words)
    assert {path: path.stat().st_mtime_ns for path in files if path != next(iter(files))}.items() <= files.items()
    assert len(list((tmp_path / "trainings").iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "cpu"), "--device keeps each training in a folder, and goes on there; pass --out DIR"),
        (("--first-seed", "-1"), "--first-seed -1 is negative; choose 0 or more"),
        (("--budget", "25min"), "--budget is of --device; add that, or leave it out"),
        (("--device", "cpu", "--out", "{}", "--budget", "25"), "--budget 25 is no time; pass a number of s, min or h"),
        (("--device", "cpu", "--out", "{}", "--only", "eden"), "eden: no size for a GPU; leave --device or these cla"),
    ],
)  # fmt: skip
def test_what_a_card_needs_is_said(run, words, message, tmp_path):
    assert f"fmtsim: error: {message}" in run(*(word.format(tmp_path) for word in words))[2]
