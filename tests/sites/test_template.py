"""The Flower app from `fedloom flower init`: its configuration, its data function, and acceptance
by Flower.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedloom.runs.config_file import configuration
from fedloom.sites.template import EXAMPLE, _literal, write_app
from forking_cli import main
from superlink_support import needs_flower

FILES = {
    "pyproject.toml", "README.md", ".gitignore",
    "federation/__init__.py", "federation/data.py",
}  # fmt: skip

JOB = """
# How it went before.
algorithms = ["fedavg", "fedmr(unit=tensor)"]
seeds = [0, 1]
rounds = 7
plugins = []
[data]
clients = 4
"""


def run_settings(app: Path) -> dict[str, Any]:
    """Return the run configuration of server and sites."""
    return dict(
        tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    )


def written(app: Path) -> set[str]:
    return {str(path.relative_to(app)) for path in app.rglob("*") if path.is_file()}


def test_without_a_file_it_is_the_example(tmp_path: Path) -> None:
    configuration = write_app(tmp_path / "my-app")
    assert written(tmp_path / "my-app") == FILES
    assert (configuration.name, configuration.data.clients, configuration.algorithm) == (
        "my-app",
        3,
        "fedmr",
    )
    text = run_settings(tmp_path / "my-app")["configuration"]
    assert tomllib.loads(text) == tomllib.loads(EXAMPLE)
    assert "$" not in (tmp_path / "my-app" / "pyproject.toml").read_text()


def test_a_file_that_names_one_method_is_taken_word_for_word(tmp_path: Path) -> None:
    text = '# Why: "quotes" and \\ and é\nalgorithm = "fedavg"\n[data]\nclients = 5 # sites\n'
    (tmp_path / "job.toml").write_text(text)
    assert write_app(tmp_path / "app", tmp_path / "job.toml").data.clients == 5
    assert run_settings(tmp_path / "app")["configuration"].strip() == text.strip()


def test_changes_and_a_chosen_method_end_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    write_app(
        tmp_path / "app",
        tmp_path / "job.toml",
        ["algorithm=scaffold", "data.clients=6", "training.epochs=2"],
    )
    written = tomllib.loads(run_settings(tmp_path / "app")["configuration"])
    assert written == {
        "name": "job", "algorithm": "scaffold", "rounds": 7, "plugins": [],
        "data": {"clients": 6}, "training": {"epochs": 2},
    }  # fmt: skip
    assert configuration(written).schedule.rounds == 7


@settings(deadline=None, max_examples=50)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    | st.text("'\"\\\n\t\r", max_size=12)
)
def test_any_text_comes_back_from_the_literal(text: str) -> None:
    # TOML readers convert \r\n to \n in multi-line strings; text from files already has \n.
    assert tomllib.loads(f"text = {_literal(text)}")["text"] in (
        text,
        f"{text}\n",
    )  # a literal text ends its last line


def test_files_that_are_there_are_not_written_over(tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(app)
    (app / "federation" / "data.py").write_text("mine = 1\n")
    (app / "README.md").unlink()
    original = {name: (app / name).read_text() for name in written(app)}
    assert main(["flower", "init", str(app), "rounds=5"]) == 2
    assert {name: (app / name).read_text() for name in written(app)} == original


def test_the_data_function_reads_the_file_that_the_site_names(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    samples = np.random.default_rng(0).random((5, 64)).astype(np.float32)
    labels = np.array([3, 1, 4, 1, 5])
    np.savetxt(tmp_path / "site.csv", np.column_stack([samples, labels]), delimiter=",")
    code = (
        "from federation.data import load; inputs, labels = load(); print(inputs.shape, "
        "inputs.dtype, labels, inputs.sum())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "app", env={"SITE_DATA": str(tmp_path / "site.csv")}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *words, total = done.stdout.split()
    assert " ".join(words) == "(5, 1, 8, 8) float32 [3 1 4 1 5]"
    assert float(total) == pytest.approx(float(samples.sum()), rel=1e-5)


@needs_flower
def test_flower_builds_it_and_leaves_keys_out(tmp_path: Path) -> None:
    app = tmp_path / "my-app"
    write_app(app, overrides=["data.clients=2"])
    for folder in ("keys", "machines"):
        (app / folder).mkdir()
        (app / folder / "secret.py").write_text("secret = 1")
    build = [str(Path(sys.executable).parent / "flwr"), "build"]
    done = subprocess.run(build, cwd=app, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (bundle,) = app.glob("*.fab")
    with zipfile.ZipFile(bundle) as archive:
        names = set(archive.namelist())
        packed = tomllib.loads(archive.read("pyproject.toml").decode())
    assert names == (FILES - {".gitignore"}) | {".info/CONTENT"}
    assert packed["tool"]["flwr"]["app"]["config"] == run_settings(app)


def imported(app: Path) -> dict[str, Any]:
    """Return the names in the data function of an app, which must be valid Python."""
    names: dict[str, Any] = {}
    exec(compile((app / "federation" / "data.py").read_text(), "data.py", "exec"), names)
    return names


def test_the_data_function_fits_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        'age,"odd ""name",outcome\n30,x,ill\n40,y,well\n50,x,ill\n60,y,well\n'
    )
    for folder in ("cat", "dog"):
        (tmp_path / "pictures" / folder).mkdir(parents=True)
        for k in range(2):
            Image.new("L", (6, 4), 10 * k).save(tmp_path / "pictures" / folder / f"{k}.png")
    data = {
        "table": f"table(path='{tmp_path}/rows.csv', target='outcome', test_fraction=0.5)",
        "elsewhere": "table(path='/nowhere.csv', target='cost', inputs=['age', 'dose'])",
        "pictures": f"images(folder='{tmp_path}/pictures', channels=1, test_fraction=0.5)",
        "numbers": "wine",
    }
    names = {}
    for kind, name in data.items():
        write_app(
            tmp_path / kind,
            overrides=[f'data.name="{name}"', "data.partition=iid", "algorithm=fedavg"],
        )
        names[kind] = imported(tmp_path / kind)
    assert (names["table"]["COLUMNS"], names["table"]["TARGET"]) == (
        ["age", 'odd "name'],
        "outcome",
    )
    assert (names["elsewhere"]["COLUMNS"], names["elsewhere"]["TARGET"]) == (
        ["age", "dose"],
        "cost",
    )
    assert (names["pictures"]["CLASSES"], names["pictures"]["SIZE"]) == (["cat", "dog"], (6, 4))
    assert names["numbers"]["SHAPE"] == (13,)
    assert "DATA=/srv/pictures" in (tmp_path / "pictures" / "README.md").read_text()
