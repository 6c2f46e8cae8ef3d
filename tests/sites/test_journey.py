"""From user files to predictions over real sites, each with separate data.

A message between a SuperLink and SuperNodes takes seconds. `make test` therefore runs every kind of
data in this process, and only test_real_sites.py runs real sites. `make chaos` runs every kind of
data between real sites.
"""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message
from PIL import Image

import fedloom as fl
from fedloom.sites import server_app
from fedloom.sites.template import write_app
from fedloom.survey.column_statistics import Statistics
from flower_support import LocalGrid, Node, nodes
from forking_cli import main
from json_lines import json_lines
from site_trial import PATIENCE
from superlink_support import Deployment, deployed, needs_flower, needs_processes

SITES = 2

pytestmark = [needs_flower, needs_processes]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("journey")
    with deployed(folder, SITES, lambda site: owner_settings(folder, site)) as running:
        yield running


def owner_settings(folder: Path, site: int) -> dict[str, str | int]:
    return {"memory": str(folder / f"memory-{site}"), "data": "federation.data:load"}


def patients(rng: np.random.Generator, rows: int) -> pd.DataFrame:
    age, dose = rng.integers(20, 90, rows), rng.lognormal(0, 0.5, rows).round(3)
    ward = rng.choice(["surgery", "medicine"], rows)
    outcome = np.where(age / 30 - dose + rng.normal(0, 0.2, rows) > 0.8, "ill", "well")
    return pd.DataFrame({"age": age, "dose": dose, "ward": ward, "outcome": outcome})


def write_table(path: Path, rng: np.random.Generator) -> None:
    patients(rng, 120).to_csv(path, index=False)


def write_texts(path: Path, rng: np.random.Generator) -> None:
    words = {"sport": ["goal", "team", "match"], "money": ["bank", "stock", "price"]}
    topics = rng.choice(list(words), 80)
    texts = [" ".join(rng.choice([*words[topic], "the"], 150)) for topic in topics]
    pd.DataFrame({"text": texts, "topic": topics}).to_csv(path, index=False)


def write_numbers(path: Path, rng: np.random.Generator) -> None:
    labels = rng.integers(0, 2, 80)
    np.savetxt(
        path, np.column_stack([rng.normal(labels[:, None], 1, (80, 4)), labels]), delimiter=","
    )


def write_pictures(path: Path, rng: np.random.Generator) -> None:
    for name, grey in (("dark", 60), ("light", 190)):
        (path / name).mkdir(parents=True)
        for k in range(12):
            pixels = rng.normal(grey, 20, (8, 8)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(path / name / f"{k}.png")


KINDS = {
    "table": (write_table, "table(target='outcome')", "mlp(hidden=[8])"),
    "texts": (write_texts, "table(path='{server}', target='topic')", "fasttext"),
    "numbers": (write_numbers, "arrays(path='{server}')", "mlp(hidden=[8])"),
    "pictures": (write_pictures, "images(folder='{server}', channels=1)", "mlp(hidden=[8])"),
}


def make_app(folder: Path, kind: str, name: str, *changes: str) -> Path:
    """Write the data of server and sites, and an app with a data function for this kind of data."""
    write, data_set, model = KINDS[kind]
    suffix = "" if kind == "pictures" else ".csv"
    for owner in ("server", *range(SITES)):
        target = folder / f"data-{owner}" / f"{kind}{suffix}"
        target.parent.mkdir(exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)
        write(
            target,
            np.random.default_rng(
                [7, list(KINDS).index(kind), 9 if owner == "server" else int(owner)]
            ),
        )
    server = folder / "data-server" / f"{kind}{suffix}"
    if kind == "numbers":
        numbers = np.loadtxt(server, delimiter=",")
        server = server.with_suffix(".npz")
        np.savez(
            server,
            inputs=numbers[:, :-1].astype(np.float32),
            labels=numbers[:, -1].astype(np.int64),
        )
    job = folder / f"{kind}.toml"
    job.write_text(
        'algorithm = "fedavg"\nrounds = 2\nparticipation = 1.0\ncheckpoint_every = 1\nmodel = '
        f'"{model}"\n'
        f'[data]\nname = "{data_set.format(server=server)}"\nclients = {SITES}\nlocal_test = 0.25\n'
        "[training]\nlearning_rate = 0.3\nsteps = 30\nbatch_size = 16\n"
    )
    app = folder / name
    write_app(app, job, changes)
    data = app / "federation" / "data.py"
    path_code = f'os.environ["SITE_DATA"] + "/{kind}{suffix}"'
    data.write_text(data.read_text().replace('os.environ["SITE_DATA"]', path_code))
    return app


def records(output: Path) -> list[dict[str, object]]:
    return json_lines(output / "metrics.jsonl")


@pytest.mark.minutes
@pytest.mark.parametrize("kind", KINDS)
def test_sites_with_data_of_their_own_give_a_model_that_scores_new_samples(
    kind: str, deployment: Deployment
) -> None:
    app = make_app(deployment.folder, kind, f"{kind}-app")
    output = deployment.folder / "runs" / app.name
    run = deployment.run(app, output=str(output), smallest=2)
    status = deployment.wait_for_run(run, 2 * PATIENCE, sign=output / "result.json")
    assert status == "finished:completed", deployment.logs()
    require_scores(kind, output, deployment.folder)


def require_statistics(app: Path, deployment: Deployment) -> None:
    """Require that a statistics run equals pandas on the rows of all sites."""
    output = deployment.folder / "runs" / "statistics"
    run = deployment.run(app, output=str(output), only="statistics", smallest=1)
    status = deployment.wait_for_run(run, PATIENCE, sign=output / "statistics.html")
    assert status == "finished:completed", deployment.logs()
    statistics = Statistics.read(output / "statistics.json")
    # Each site reserves a quarter of its rows for the evaluation of the model.
    assert (statistics.clients, statistics.columns["age"].count) == (SITES, SITES * 90)
    pooled = pd.concat(
        [pd.read_csv(deployment.folder / f"data-{site}" / "table.csv") for site in range(SITES)]
    )
    assert statistics.columns["dose"].mean == pytest.approx(pooled["dose"].mean(), rel=0.1)
    assert not (output / "metrics.jsonl").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_is_read_by_the_apps_function(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data function reads every kind of data on nodes in this process with separate
    `SITE_DATA`.
    """

    class Place(Node):
        def answer(self, message: Message, run_config: dict[str, Any], node: int) -> Message:
            monkeypatch.setenv("SITE_DATA", str(tmp_path / f"data-{self.config['partition-id']}"))
            return super().answer(message, run_config, node)

    app = make_app(tmp_path, kind, f"{kind}-app")
    monkeypatch.syspath_prepend(app)
    for name in ("federation", "federation.data"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"output": str(tmp_path / "run"), "smallest": 2}
    plain = nodes(SITES, tmp_path / "memory", data="federation.data:load")
    server_app.serve(
        LocalGrid({number: Place(node.config) for number, node in plain.items()}, config),
        config,
        0.01,
    )
    require_scores(kind, tmp_path / "run", tmp_path)


def require_scores(kind: str, output: Path, folder: Path) -> None:
    """Require that the run has no fault and that its model predicts new samples."""
    assert not any(record["faults"] for record in records(output))
    predictor = fl.load(output)
    rng = np.random.default_rng(5)
    if kind == "table":
        rows = patients(rng, 60)
        assert np.mean(predictor.predict(rows.drop(columns="outcome")) == rows["outcome"]) > 0.7
        statistics = json.loads((output / "statistics.json").read_text())
        assert statistics["columns"]["age"]["count"] == SITES * 90
    elif kind == "texts":
        write_texts(folder / "new.csv", rng)
        rows = pd.read_csv(folder / "new.csv")
        assert np.mean(predictor.predict(rows) == rows["topic"]) > 0.7
    elif kind == "numbers":
        assert list(map(str, predictor.predict(np.array([[3.0] * 4, [-3.0] * 4], np.float32)))) == [
            "1",
            "0",
        ]
    else:
        write_pictures(folder / "new-pictures", rng)
        files = sorted((folder / "new-pictures").glob("*/*.png"))
        names = [path.parent.name for path in files]
        assert np.mean(np.array(names) == np.array(predictor.predict(files))) > 0.9


@pytest.mark.minutes
def test_from_csv_files_to_predictions_though_a_site_is_killed_and_comes_back(
    deployment: Deployment, tmp_path: Path
) -> None:
    app = make_app(deployment.folder, "table", "journey", "rounds=4", "personal_every=1")
    require_statistics(app, deployment)
    output = deployment.folder / "runs" / "journey"
    run = deployment.run(app, output=str(output), smallest=2)

    def rounds() -> int:
        path = output / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    deployment.wait_until(lambda: rounds() >= 1, PATIENCE, "round 1 to end")
    deployment.kill("site-1")
    deployment.wait_until(lambda: rounds() >= 2, PATIENCE, "round 2 to end")
    deployment.start_site(1, **owner_settings(deployment.folder, 1))
    assert (
        deployment.wait_for_run(run, 4 * PATIENCE, sign=output / "result.json")
        == "finished:completed"
    )
    absent = {record["round"]: record["faults"] for record in records(output) if record["faults"]}
    assert all(fault["client"] == 1 for faults in absent.values() for fault in faults)  # type: ignore[attr-defined]
    assert absent
    clients = json_lines(output / "clients.jsonl")
    assert 0 in clients[-1]["client"]["clients"]
    rows = patients(np.random.default_rng(5), 60)
    rows.drop(columns="outcome").to_csv(tmp_path / "new.csv", index=False)
    # Predictions need only this directory.
    shutil.copytree(output, tmp_path / "model")
    scored = tmp_path / "scored.csv"
    assert (
        main(["predict", str(tmp_path / "model"), str(tmp_path / "new.csv"), "--to", str(scored)])
        == 0
    )
    answers = pd.read_csv(scored)
    (column,) = [name for name in answers if name not in rows.columns[:-1]]
    assert np.mean(answers[column] == rows["outcome"]) > 0.7
