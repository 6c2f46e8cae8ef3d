"""Untrusted text from sites and files in printed, logged and written output."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import fedloom as fl
from fedloom.common.errors import InvalidValue, RefusedReply, printable
from fedloom.common.plugins import found_at, import_from_environment, refused_code
from fedloom.data.columns import TableColumn, TableInputs
from fedloom.data.preprocessing import ModelOutputs, Preprocessing
from fedloom.report.card import model_card
from fedloom.report.cells import Cell
from fedloom.report.summary import RunSummary
from fedloom.runs.progress import Display
from fedloom.sites import messages
from fedloom.sites.agreement import read_configuration
from fedloom.sites.site_data import DataAgreement

HOSTILE = "x\x1b]0;owned\x07\x1b[2J\r\nfedloom: all is well \u202e`\ud800 " + "y" * 100_000


def is_clean(text: str) -> bool:
    text.encode()
    return not {"\x1b", "\x07", "\r", "\u202e"} & set(text)


def test_a_line_of_the_log_is_one_bounded_line(caplog: pytest.LogCaptureFixture) -> None:
    assert messages.PROTOCOL
    logger = logging.getLogger("flwr.fedloom")
    logger.addHandler(caplog.handler)
    try:
        logger.warning("round %d: site %d: %s", 1, 2, HOSTILE)
        logger.warning("node %d takes no part: %s", 1, RefusedReply(HOSTILE))
    finally:
        logger.removeHandler(caplog.handler)
    for record in caplog.records:
        text = record.getMessage()
        assert is_clean(text)
        assert "\n" not in text
        assert len(text) < 2100


def test_cells_of_tables_and_lines_of_progress_are_clean() -> None:
    assert is_clean(Cell(HOSTILE, None).text)
    assert printable("plain – text") == "plain – text"
    console = Console(file=io.StringIO(), width=80)
    Display(console, 1, 1).line(HOSTILE)
    assert is_clean(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_model_card_holds_no_steering_characters() -> None:
    run = RunSummary(
        HOSTILE,
        0,
        [{"round": 1, "accuracy": 0.5, HOSTILE: 0.25}],
        [{"round": 1, "seconds": 1.0, "notices": [HOSTILE[:200]]}],
        configuration={"data": {"name": "table(target='t')"}, "training": {"optimizer": HOSTILE}},
        environment={"python": HOSTILE},
    )
    inputs = TableInputs((TableColumn(HOSTILE, (HOSTILE, "b")), TableColumn("age")))
    preprocessing = Preprocessing(inputs, ModelOutputs("class", HOSTILE, (HOSTILE, "well")))
    sizes = {"train_samples": 1, "test_samples": 1, "parameters": 2}
    card = model_card(run, preprocessing, HOSTILE, sizes)
    lines = card.splitlines()
    assert len(lines) == card.count("\n") == 27  # no line is broken
    for line in lines:
        assert is_clean(line)
        assert len(line) < 1000
        assert line.count("`") % 2 == 0


def test_a_terminal_that_only_knows_ascii_gets_question_marks() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    code = "import sys; from fedloom.cli import main; sys.exit(main(['algorithms', 'fedmr']))"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-500:]
    code = (
        "import sys, fedloom.cli as c, typer\n"
        "@c.app.command()\n"
        "def say():\n    print('\\u03b5 \\u00b1 \\u2013')\n"
        "sys.exit(c.main(['say']))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, b"? ? ?\n"), ran.stderr[-500:]


@pytest.mark.parametrize(
    "objective",
    [
        r"classification(criterion='sidefx\x3af')", r"classification(criterion='sidefx\u003af')",
        "classification(criterion='sidefx:f')", "sidefx:f", "classification(criterion=sidefx:Loss)",
    ],
)  # fmt: skip
def test_a_server_has_no_site_import_a_module(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sidefx.py").write_text("def f(outputs, targets):\n    return None\nLoss = f\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = DataAgreement.of(fl.make_task("digits", clients=2, partition="iid").dataset).words()
    assert DataAgreement.read(words).objective == "classification"
    with pytest.raises(RefusedReply, match="the server sent no valid description of the data"):
        DataAgreement.read({**words, "objective": objective})
    assert "sidefx" not in sys.modules
    agreement = replace(DataAgreement.read(words), objective=objective)
    configuration = read_configuration("algorithm='fedavg'\n[data]\nname='digits'\nclients=2")
    with pytest.raises(InvalidValue):
        agreement.dataset(str(tmp_path), configuration)
    assert "sidefx" not in sys.modules


def test_refusals_nest_and_spare_the_modules_of_the_users_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_plugin_here.py").write_text("def f():\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDLOOM_PLUGINS", "own_plugin_here")
    with refused_code():
        with refused_code():
            import_from_environment()
        with pytest.raises(InvalidValue, match="is not trusted here"):
            found_at("own_plugin_here:f", "criterion")
    assert found_at("own_plugin_here:f", "criterion")() is None
