"""The names of the package: all exist, and each is loaded only at its first use."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom
import fedloom.cli
from fedloom.algorithm import Algorithm, algorithms
from fedloom.algorithm.method import Method
from fedloom.parts.hooks import Part

ROOT = Path(__file__).resolve().parents[2]

METHODS = {
    entry.make.__name__: entry.make
    for entry in algorithms
    if entry.make.__module__.startswith("fedloom.")
}

BASES = (Method, Algorithm, Part)

# User code; a comment names the error that a type checker must report on its line.
USER = """\
import fedloom as fl
from fedloom.algorithm import algorithms

method: fl.FedMR = fl.FedMR(unit="tensor", local=fl.FedProx(mu=0.1))
staged = fl.Stages([(fl.FedAvg(), 2), (method, None)])
task = fl.make_task("digits", clients=4, training=fl.Training(learning_rate=0.1))
accuracy: float = fl.run(staged, task, rounds=2).accuracy
fl.FedMR(unit="row")  # arg-type
fl.FedProx(nu=0.1)  # call-arg
fl.FedNothing()  # attr-defined
reveal_type(algorithms.register("mine"))
"""


LARGE = (
    "torch",
    "numpy",
    "scipy",
    "sklearn",
    "pandas",
    "pyarrow",
    "plotly",
    "matplotlib",
    "flwr",
    "ray",
    "cryptography",
    "rich",
)
"""Packages that take a type checker long to read, and say nothing of fedloom's names."""


def test_every_listed_name_is_there() -> None:
    assert len(set(fedloom.__all__)) == len(fedloom.__all__) > 50
    for name in fedloom.__all__:
        assert getattr(fedloom, name) is not None
    assert set(fedloom.__all__) <= set(dir(fedloom))


def test_the_listed_methods_are_the_registered_ones() -> None:
    listed = {name: getattr(fedloom, name) for name in fedloom.__all__}
    assert {
        name: value
        for name, value in listed.items()
        if inspect.isclass(value) and issubclass(value, Method) and value not in BASES
    } == METHODS


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="FedNothing"):
        _ = fedloom.FedNothing  # type: ignore[attr-defined]


def test_a_type_checker_knows_every_name_and_finds_a_users_mistakes(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    user = tmp_path / "user.py"
    user.write_text(USER + "".join(f"reveal_type(fl.{name})\n" for name in fedloom.__all__))
    settings = tmp_path / "mypy.ini"
    package = Path(fedloom.__file__).parents[1]
    settings.write_text(
        f"[mypy]\nmypy_path = {package}\nstrict = True\nfollow_imports = silent\n"
        f"[mypy-{','.join(f'{name}.*' for name in LARGE)}]\nfollow_imports = skip\n"
    )
    cache = ROOT / ".mypy_cache" / "user"
    output, trouble, _ = api.run(
        ["--config-file", str(settings), "--cache-dir", str(cache), str(user)]
    )
    assert trouble == ""
    expected = [
        (str(n), line.split("# ")[1]) for n, line in enumerate(USER.splitlines(), 1) if "# " in line
    ]
    assert re.findall(r"^.*user\.py:(\d+): error: .*\[([\w-]+)\]$", output, re.M) == expected, (
        output
    )
    decorator, *types = re.findall(r'note: Revealed type is "(.*)"$', output, re.M)
    # Pyright, unlike mypy, uses the return type of a decorator as the class.
    assert re.fullmatch(r"def \[(\w+).*\] \(\1.*\) -> \1.*", decorator), decorator
    assert len(types) == len(fedloom.__all__)
    assert "Any" not in types
    packages = ("-> fedloom.algorithms.", "-> fedloom.parts.")
    made = [
        type_
        for type_ in types
        if any(package in type_ for package in packages) and not type_.endswith(".Part")
    ]
    assert len(made) == len(METHODS)


LIGHT = [
    ["--version"], ["--help"], ["run", "--help"], ["lst"], ["run", "--quite"], ["list"], ["list", "algorithms"],
    ["list", "fedmr"], ["list", "fedmrr"], ["list", "models"], ["list", "FedALA"], ["models"],
]  # fmt: skip


def test_commands_that_only_tell_something_load_no_torch() -> None:
    fedloom.cli.main(["list"])  # fills the cache
    code = f"""
import sys, fedloom.cli
for arguments in {LIGHT}:
    fedloom.cli.main(arguments)
    loaded = {{"torch", "numpy", "pydantic"}} & sys.modules.keys()
    assert not loaded, (arguments, loaded)
"""
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr


def test_a_run_loads_no_library_that_it_does_not_use(tmp_path: Path) -> None:
    job = (
        'algorithm = "fedavg"\nrounds = 1\nmodel = "logistic"\n[data]\nname = '
        '"digits"\nclients = 4\n'
    )
    (tmp_path / "job.toml").write_text(job)
    code = (
        "import sys, fedloom.cli; print(fedloom.cli.main(['run', 'job.toml'])); print(*sys.modules)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    *_, exit_code, loaded = completed.stdout.splitlines()
    assert exit_code == "0"
    # The tables of the report are pandas frames, and pandas loads pyarrow.
    unused = {
        "sklearn", "scipy", "sympy", "dp_accounting", "ray", "flwr", "torchmetrics", "optuna",
        "transformers", "datasets", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes",
    }  # fmt: skip
    assert {"torch", "plotly"} <= set(loaded.split())
    assert unused & set(loaded.split()) == set()


def test_the_example_of_the_readme_predicts_new_rows(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ages = [20 + number % 60 for number in range(600)]
    rows = [(age, "ill" if age > 50 else "well", age % 3) for age in ages]
    patients = "".join(f"{age},{outcome},{hospital}\n" for age, outcome, hospital in rows)
    (tmp_path / "patients.csv").write_text("age,outcome,hospital\n" + patients)
    (tmp_path / "new.csv").write_text("age\n21\n79\n")
    file = tmp_path / "readme.py"
    file.write_text("import torch\ntorch.set_num_threads(1)\n" + block)
    completed = subprocess.run(
        [sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert completed.stdout.splitlines()[-1] == "['well' 'ill']"
    assert (tmp_path / "runs/patients/result.json").exists()
