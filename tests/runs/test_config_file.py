"""Configurations from files and the command line; each error is one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fedloom.common.errors import FedloomError, InvalidValue
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


WRONG = [
    ("rouns=3", "did you mean 'rounds'?"),
    ("data.client=3", "did you mean 'data.clients'?"),
    ("learning_rate=0.1", "did you mean 'training.learning_rate'?"),
    ("data.learning_rate=0.1", "did you mean 'training.learning_rate'?"),
    ("training.learning_rat=0.1", "did you mean 'training.learning_rate'?"),
    ("zzz=1", "unknown key 'zzz': there are rounds, participation, seed"),
    ("rounds=ten", "rounds must be a whole number, not 'ten'"),
    ("rounds=2.5", "rounds must be a whole number, not 2.5"),
    ("rounds=true", "rounds must be a whole number, not true"),
    ("rounds=0", "rounds must be at least 1, not 0"),
    ("rounds.x=1", "rounds must be a whole number, not {'x': 1}"),
    ("model.x=1", "'model' is no table"),
    ("rounds", "'rounds' is not key=value"),
    ("=3", "'=3' is not key=value"),
    ("participation=0", "participation must be in (0, 1], not 0"),
    ("participation=1.01", "participation must be in (0, 1], not 1.01"),
    ("dropout=-0.1", "dropout must be in [0, 1), not -0.1"),
    ("evaluate_every=0", "evaluate_every must be at least 1, not 0"),
    ("checkpoint_every=0", "checkpoint_every must be at least 1, not 0"),
    ("pool_budget=4Gb", "pool_budget must be a number of bytes, such as 4GiB, not '4Gb'"),
    ("pool_budget=-1", "pool_budget must be at least 0, not -1"),
    (f"pool_budget='{400 * '9'}'", "pool_budget must be a number of bytes, such as 4GiB, not '99"),
    ("pool_budget=99999999999TB", "pool_budget must be between 0 and 9.22337e+18, not 9"),
    (
        "algorithm=quantised(fedavg, bucket=10000000000000)",
        "bucket must be between 1 and 1e+06, not 10000000000000",
    ),
    ("seed=-1", "seed must be at least 0, not -1"),
    ("seeds=[1, x]", "seeds[1] must be a whole number, not 'x'"),
    ("seeds=[1, 1]", "seeds must differ"),
    ("targets=[80]", "must be between 0 and 1, not 80"),
    ("targets=0.8", "targets must be a list, not 0.8"),
    ("threads=0", "threads must be between 1 and"),
    ("workers=0", "workers must be at least 1"),
    ("name=a/b", "name 'a/b'"),
    ("data=digits", "data must be a table with the keys name, clients"),
    ("data.name=digit", "did you mean 'digits'?"),
    ("data.clients=many", "data.clients must be a whole number, not 'many'"),
    ("data.clients=-2", "data.clients must be at least 0, not -2"),
    ("data.local_test=1", "data.local_test must be in (0, 1), not 1"),
    ("data.merge=1", "data.merge must be true or false, not 1"),
    ("data.partition=dirichlt(0.1)", "did you mean 'dirichlet'?"),
    ("data.partition=dirichlet(beta=1)", "dirichlet has no parameter 'beta'"),
    ("data.partition=dirichlet(", "cannot read 'dirichlet('"),
    ("training.momentum=-1", "training.momentum must be in [0, 1), not -1"),
    ("training.momentum=1", "training.momentum must be in [0, 1), not 1"),
    (
        "training.learning_rate=inf",
        "training.learning_rate must be greater than 0 and at most 3.4e+38, not inf",
    ),
    ("training.learning_rate=nan", "training.learning_rate must be greater than 0"),
    ("training.learning_rate='0.1'", "training.learning_rate must be a number, not '0.1'"),
    (
        "training.weight_decay=inf",
        "training.weight_decay must be at least 0 and at most 3.4e+38, not inf",
    ),
    ("dropout=1", "dropout must be in [0, 1), not 1"),
    ("new_clients=1", "new_clients must be in [0, 1), not 1"),
    ("directory='a\0b'", "directory must be text without NUL or lone surrogates, not "),
    ("targets=[nan]", "targets[0] must be greater than 0 and at most 3.4e+38 or text, not nan"),
    ("training.optimizer=sdg", "did you mean 'sgd'?"),
    ("training.epochs=half", "training.epochs must be a whole number, not 'half'"),
    ("training.optimizer_options=3", "training.optimizer_options must be a table, not 3"),
    ("model=cnm4", "did you mean 'cnn4'?"),
    ("model=mlp(widths=[3])", "mlp has no parameter 'widths'"),
    ("algorithm=fedmrr", "did you mean 'fedmr'?"),
    ("algorithm=fedmr(fraction=0)", "fraction must be in (0, 1], not 0"),
    ("algorithm=fedmr(unti=layer)", "did you mean 'unit'?"),
    ("algorithm=fedmr(unit=leaf)", "unit"),
    ("algorithm=stages(fedavg, fedmr)", "each but the last with its last round"),
    ("algorithm=fedavg:3", "is only allowed inside stages"),
    ("algorithms=[fedavg, fedmrr]", "did you mean 'fedmr'?"),
    ("algorithms=[fedmr, fedmr(unit=layer)]", "twice"),
    ("algorithms=fedavg", "algorithms must be a list or a table, not 'fedavg'"),
]


@pytest.mark.parametrize(("override", "message"), WRONG, ids=[override for override, _ in WRONG])
def test_bad_configurations_are_refused_in_one_line(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(FedloomError) as caught:
        load(write(tmp_path, 'algorithm = "fedavg"\nmodel = "mlp"'), [override]).task(0)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = = 3", "is not a TOML file"),
        (b"\xff\xfe\x00", "not a TOML file: .* codec can't decode byte 0xff"),
        (b"rounds = 3\nrounds = 4", "not a TOML file"),
    ],
)
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidValue, match=message):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"cannot read .*nothing\.toml: no such file"):
        load(tmp_path / "nothing.toml")


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
