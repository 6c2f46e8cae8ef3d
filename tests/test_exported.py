"""The names of the package: what is there, and that nothing is loaded before it is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom
from fedloom.algorithm import Algorithm, algorithms


def test_every_exported_name_is_there() -> None:
    for name in fedloom.__all__:
        assert getattr(fedloom, name) is not None
    assert set(fedloom.__all__) <= set(dir(fedloom))


def test_every_registered_method_is_there_under_its_class_name() -> None:
    entries = list(algorithms)
    assert {entry.name for entry in entries} >= {"fedavg", "fedmr", "indep", "stages"}
    for entry in entries:
        assert issubclass(entry.make, Algorithm)
        assert getattr(fedloom, entry.make.__name__) is entry.make
        assert entry.make.__name__ in dir(fedloom)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FedNothing'"):
        _ = fedloom.FedNothing


def test_importing_the_package_and_asking_for_help_load_no_torch() -> None:
    code = "import sys, fedloom, fedloom.cli; fedloom.cli.main(['--version']); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["fedloom", fedloom.__version__, "False"]


def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    code = "import torch\ntorch.set_num_threads(1)\n" + "\n".join(blocks)
    file = tmp_path / "readme.py"
    file.write_text(code + "print(type(staged.federation.algorithm).__name__)\n")
    found = subprocess.run([sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True, check=True)
    accuracy, best, _ = found.stdout.splitlines()[0].split()
    assert 0.5 < float(accuracy) <= float(best) <= 1
    assert found.stdout.split()[-1] == "Stages"
    assert (tmp_path / "report.html").exists()
