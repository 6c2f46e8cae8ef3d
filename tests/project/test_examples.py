"""Every script in examples/ runs unchanged, without warnings, and prints the documented output."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.runs.config_file import load
from fedloom.study.comparison import Comparison
from forking_scripts import Scripts

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SHOWN = dict(
    re.findall(
        r'^```text title="examples/(\w+)\.py"\n(.*?)^```$',
        "".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))),
        re.M | re.S,
    )
)
NUMBER = re.compile(r"\d+\.?\d*")


@pytest.fixture
def output(scripts: Scripts, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that runs a script in an empty folder, requires that the folder stays
    empty, and returns the output.
    """

    def run(name: str) -> str:
        folder = tmp_path / "empty"
        folder.mkdir()
        text = scripts.run(EXAMPLES / f"{name}.py", folder, tmp_path / "output", strict=True)
        assert list(folder.iterdir()) == []
        return text

    return run


def numbers(text: str, method: str) -> list[float]:
    """Return the numbers on a method's line."""
    (line,) = [line for line in text.splitlines() if line.startswith(method + " ")]
    return [float(number) for number in re.findall(r"\d+\.?\d*", line.removeprefix(method))]


def test_every_script_is_shown() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWN)
    assert all(
        len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 65
        for name in SHOWN
        if name not in ("own_data", "lora")  # 101 lines at most
    )


@pytest.mark.parametrize(
    "name",
    ["own_metric", "own_optimizer", "own_server", "image_folder", "pandas_table", "next_character"],
)
def test_a_script_prints_what_its_page_shows(name: str, output: Callable[[str], str]) -> None:
    printed, shown = output(name), SHOWN[name]
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    numbers_printed, numbers_shown = (
        [float(number) for number in NUMBER.findall(text)] for text in (printed, shown)
    )
    assert numbers_printed == pytest.approx(
        numbers_shown, abs=6
    )  # per cent of about 100 samples; processors round differently


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.toml")))
def test_every_method_of_a_configuration_trains(name: str, tmp_path: Path) -> None:
    configuration = load(
        EXAMPLES / f"{name}.toml", ["rounds=2", "seeds=[0]", "workers=1", f"directory={tmp_path}"]
    )
    comparison = Comparison.of(configuration)
    assert comparison.run(lambda event: None) == {}
    assert all(sheet.rows["final"].iloc[0] is not None for sheet in comparison.result({}).sheets)


def test_a_method_of_ones_own_is_compared_with_two_others(output: Callable[[str], str]) -> None:
    text = output("own_method")
    for method in ("fedavg", "heavy_clients", "stages(heavy_clients:15, fedmr)"):
        accuracy_0, accuracy_1, *rounds, size = numbers(text, method)
        assert min(accuracy_0, accuracy_1) > 70
        assert max(rounds) <= 30
        # ten models of float32
        assert size == pytest.approx(10 * 4 * (64 * 64 + 64 + 64 * 10 + 10) / 1000, abs=1)


def test_personal_models_are_better_and_fairer_where_clients_differ(
    output: Callable[[str], str],
) -> None:
    text = output("personalise")
    plain, personal = numbers(text, "fedprox(mu=0.1)"), numbers(text, "ala(fedprox(mu=0.1))")
    assert plain[0] == plain[1]  # without personalisation, a client's model is the global model
    assert personal[1] > plain[1] + 5
    assert personal[2] > plain[2]
    assert personal[3] < plain[3]


def test_own_data_go_from_arrays_to_a_saved_model(output: Callable[[str], str]) -> None:
    text = output("own_data")
    assert text.startswith("40 machines, ")
    read, run = (float(share) for share in re.findall(r"(\d+\.\d) %", text.splitlines()[-1]))
    assert read == run == numbers(text, "stages(fedavg:15, fedmr)")[0]
    assert run > 60
    assert "model.safetensors" in text
