"""Configurations from files and the command line; each error is one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fedloom.common.training import Training
from fedloom.data.dataset import datasets
from fedloom.rounds.schedule import Schedule
from fedloom.runs.config_file import configuration, load
from fedloom.runs.configuration import Configuration, Data
from fedloom.runs.directory import folder_name

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_with_its_tables(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        algorithm = "fedmr"
        rounds = 7
        participation = 1
        model = "mlp(hidden=[9])"
        [data]
        clients = 5
        local_test = 0.25
        [training]
        learning_rate = 0.5
        batch_size = "none"
        momentum = 0.9
        optimizer_options = { nesterov = true }
        """,
    )
    loaded = load(path)
    assert loaded.name == "job"
    assert loaded.folder == Path("runs/job")
    assert loaded.schedule == Schedule(rounds=7, participation=1.0)
    assert loaded.data == Data(clients=5, local_test=0.25)
    assert loaded.training == Training(
        learning_rate=0.5, momentum=0.9, batch_size=None, optimizer_options={"nesterov": True}
    )
    assert loaded.resolved("fedmr(unit=layer)", 3)["algorithm"] == "fedmr"
    assert loaded.resolved("fedmr", 3)["seed"] == 3


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rounds=5", "schedule.rounds", 5),
        ("participation = 0.25", "schedule.participation", 0.25),
        ("evaluate_every=none", "schedule.evaluate_every", None),
        ("algorithm=fedmr", "algorithm", "fedmr"),
        ("algorithm='fedmr'", "algorithm", "fedmr"),
        ("algorithm=stages(fedavg:2, fedmr)", "algorithm", "stages(fedavg:2, fedmr)"),
        ("algorithms=[fedavg, fedmr(unit=segment, fraction=0.5)]", "algorithms", ["fedavg", "fedmr(unit=segment, fraction=0.5)"]),
        ('algorithms=["fedavg"]', "algorithms", ["fedavg"]),
        ("seeds=[0,1]", "seeds", [0, 1]),
        ("training.learning_rate=1e-3", "training.learning_rate", 1e-3),
        ("training.steps=3", "training.steps", 3),
        ("training.optimizer_options.nesterov=false", "training.optimizer_options", {"nesterov": False}),
        ("data.partition=dirichlet(0.1)", "data.partition", "dirichlet(0.1)"),
        ("data.merge=true", "data.merge", True),
        ("data.local_test=none", "data.local_test", None),
        ("directory=elsewhere/x", "directory", "elsewhere/x"),
    ],
)  # fmt: skip
def test_the_command_line_changes_any_key(
    tmp_path: Path, override: str, key: str, value: Any
) -> None:
    setting: Any = load(write(tmp_path, 'algorithm = "fedavg"'), [override])
    for name in key.split("."):
        setting = getattr(setting, name)
    assert setting == value


def test_every_field_of_schedule_and_training_is_a_key() -> None:
    schedule = {
        field.name: getattr(Schedule(), field.name) for field in dataclasses.fields(Schedule)
    }
    training, clock = dataclasses.asdict(Training()), dataclasses.asdict(schedule.pop("clock"))
    stop = {
        key: "none" if value is None else value
        for key, value in dataclasses.asdict(schedule.pop("stop")).items()
    }
    plain = {key: "none" if value is None else value for key, value in schedule.items()}
    spelled = {key: "none" if value is None else value for key, value in training.items()}
    timed = {key: "none" if value is None else value for key, value in clock.items()}
    assert (
        configuration({**plain, "training": spelled, "clock": timed, "stop": stop})
        == Configuration()
    )


def test_the_default_data_and_the_example_exist() -> None:
    assert Configuration().data.name in datasets
    example = load(ROOT / "examples" / "digits.toml")
    assert example.data == Data(name="digits", clients=20, partition="dirichlet(0.1)")
    assert example.schedule.participation == 0.5
    assert len(example.seeds) > 1
    assert len(example.algorithms) > 1


def test_folder_names_of_methods_differ() -> None:
    expressions = [
        "fedavg",
        "fedmr(unit='segment', fraction=0.5)",
        "fedmr(unit='segment', fraction=0.25)",
        "stages(fedavg:20, fedmr)",
        "stages(fedavg:2, fedmr)",
        "ala(stages(fedavg:20, fedmr))",
        "ala(stages(fedavg:20), fedmr)",
    ]
    names = [folder_name(expression) for expression in expressions]
    assert names[0] == "fedavg"
    assert names[1] == "fedmr-unit=segment-fraction=0.5"
    assert names[3] == "stages-fedavg_20-fedmr"
    assert len(set(names)) == len(names)
    assert len(folder_name("stages(" + ", ".join(f"fedavg:{k}" for k in range(1, 90)) + ")")) < 120


def test_the_default_measure_is_personal_if_personal_figures_are_taken() -> None:
    personal = {"personal_every": 5, "data": {"local_test": 0.25}}
    assert configuration({}).measure == "last"
    assert configuration({"personal_every": 5}).measure == "last"  # no client has test data
    assert configuration({"data": {"local_test": 0.25}}).measure == "last"
    assert configuration(personal).measure == "personal"
    assert configuration({**personal, "measure": "best"}).measure == "best"
    (varied,) = configuration({**personal, "settings": {"rounds": [7]}}).settings.values()
    assert varied.measure == "personal"
