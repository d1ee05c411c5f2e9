# SPDX-License-Identifier: Apache-2.0
"""The checks for a GPU: each ends in a line, errors and what takes too long included, and others are not run."""

import pytest

from tools import run_on_gpu as card


def test_a_table_of_how_checks_ended(tmp_path, monkeypatch, capsys):
    checks = (
        ("good", ("-c", "print('first'); print('last')"), 60),
        ("bad", ("-c", "import sys; sys.exit('an error')"), 60),
        ("long", ("-c", "import time; time.sleep(60)"), 1),
        ("other", ("-c", "raise AssertionError('not asked for')"), 60),
    )
    monkeypatch.setattr(card, "CHECKS", checks)
    assert card.main(["--out", str(tmp_path / "found"), "--only", "good,bad,long"]) == 1
    table = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [(row[0], row[1]) for row in table] == [("good", "passed"), ("bad", "status"), ("long", "more")]
    assert table[0][-1] == "last" and table[1][-2:] == ["an", "error"]
    assert (tmp_path / "found" / "good.txt").read_text() == "first\nlast\n"
    assert card.main(["--out", str(tmp_path), "--only", "good"]) == 0
    with pytest.raises(SystemExit):
        card.main(["--out", str(tmp_path), "--only", "goods"])
    assert "there is no check 'goods'" in capsys.readouterr().err
