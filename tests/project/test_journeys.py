"""Complete user workflows, from a data file to predictions of the trained model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedloom as fl
from forking_cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_from_a_csv_file_to_predictions_in_a_notebook(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "examples" / "patients.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = [
        "".join(output.get("text", "") for output in cell.get("outputs", ()))
        for cell in notebook.cells
    ]
    accuracy = next(
        float(text.split()[0]) for text in printed if text.endswith("% of the new patients\n")
    )
    assert accuracy > 70
    model = fl.load(tmp_path / "runs" / "patients")
    assert model.classes == ("no", "yes")


def test_from_pictures_in_folders_to_onnx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    for label, name in enumerate(("dark", "light")):
        folder = tmp_path / "pictures" / name
        folder.mkdir(parents=True)
        for number in range(30):
            pixels = draw.integers(100 * label, 100 * label + 150, (12, 10, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:02}.png")
    Path("shades.toml").write_text(
        'algorithm = "fedavg"\nrounds = 6\nmodel = "mlp(hidden=[8])"\nengine = "rows"\n[data]\n'
        'name = "images(folder=\'pictures\', size=8)"\nclients = 3\npartition = "iid"\n'
        "[training]\nlearning_rate = 0.1\nepochs = 5\n"
    )
    assert main(["run", "shades.toml", "-q"]) == 0
    assert main(["export", "runs/shades", "--to", "onnx", "--output", "shades.onnx"]) == 0
    capsys.readouterr()
    assert main(["predict", "runs/shades", "pictures/light", "--to", "light.csv"]) == 0
    rows = Path("light.csv").read_text().splitlines()
    assert rows[0] == '"file","prediction"'
    assert sum(row.endswith('"light"') for row in rows[1:]) >= 28
    # The ONNX model takes image bytes at the size of the data; it contains the normalization.
    model = fl.load("runs/shades")
    paths = sorted(Path("pictures/light").glob("*.png"))
    pixels = model.preprocessing.apply(paths)[0]
    session = runtime.InferenceSession("shades.onnx", providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"inputs": pixels.numpy()})[0]
    assert [model.classes[k] for k in outputs.argmax(1)] == model.predict(paths).tolist()
    assert np.allclose(outputs, model.outputs(paths).numpy(), atol=1e-4)


RESNET = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, inputs):
        hidden = torch.relu(self.norm(self.first(inputs)))
        return torch.relu(inputs + self.second(hidden))


def make(spec, width=4):
    return nn.Sequential(
        nn.Conv2d(spec.shape[0], width, 3, padding=1), Block(width),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, spec.outputs),
    )
"""

RESIDUAL_TABLE = """
import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, spec, width):
        super().__init__()
        self.inputs = nn.Linear(spec.shape[0], width)
        self.hidden = nn.Linear(width, width)
        self.outputs = nn.Linear(width, spec.outputs)

    def forward(self, rows):
        hidden = self.inputs(rows)
        return self.outputs(hidden + torch.relu(self.hidden(hidden)))


def make(spec, width=4):
    return Residual(spec, width)
"""


def write_shades(folder: Path, count: int, seed: int) -> None:
    """Write pictures of two classes, dark and light."""
    draw = np.random.default_rng(seed)
    for label, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(100 * label, 100 * label + 150, (8, 8)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_from_an_own_resnet_to_onnx(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    Path("my_resnet.py").write_text(RESNET)
    write_shades(Path("pictures"), 24, seed=0)
    write_shades(Path("new"), 10, seed=1)
    Path("job.toml").write_text(
        'algorithm = "fedavg"\nrounds = 4\nengine = "rows"\nmodel = "my_resnet:make(width=8)"\n'
        "[data]\nname = \"images(folder='pictures', size=8, channels=1)\"\n"
        'clients = 3\npartition = "iid"\n[training]\nlearning_rate = 0.2\nepochs = 5\n'
    )
    assert main(["run", "job.toml", "-q"]) == 0
    files = sorted(Path("new").glob("*/*.png"))
    names = [path.parent.name for path in files]
    for words in (["predict", "runs/job", "new/dark"], ["export", "runs/job"]):
        capsys.readouterr()
        assert main(words) == 2
        assert "--trust-code" in capsys.readouterr().err
    for name in ("dark", "light"):
        words = ["predict", "runs/job", f"new/{name}", "--to", f"{name}.csv", "--trust-code"]
        assert main(words) == 0
    rows = [line for name in ("dark", "light") for line in _rows(Path(f"{name}.csv"))]
    model = fl.load("runs/job", trust_code=True)
    assert [line.split(",")[1].strip('"') for line in rows] == model.predict(files).tolist()
    measured = model.evaluate(files, names)
    accuracy = np.mean(model.predict(files) == np.array(names))
    assert measured.frame()["accuracy"].tolist() == pytest.approx([accuracy])
    assert accuracy > 0.9
    assert main(["export", "runs/job", "--output", "res.onnx", "--trust-code"]) == 0
    session = runtime.InferenceSession("res.onnx", providers=["CPUExecutionProvider"])
    inputs = model.preprocessing.apply(files)[0]
    outputs = session.run(None, {"inputs": inputs.numpy()})[0]
    expected = model.outputs(files).numpy()
    assert np.allclose(outputs, expected, atol=1e-4)
    assert np.ptp(expected) > 0.1


def _rows(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:]


def test_an_own_model_of_a_table_is_evaluated_by_the_command(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my_residual.py").write_text(RESIDUAL_TABLE)
    draw = np.random.default_rng(0)
    table = draw.normal(size=(150, 3)).round(3)
    labels = np.where(table[:, 0] * table[:, 1] > 0, "same", "other")
    lines = [f"{a},{b},{c},{label}" for (a, b, c), label in zip(table, labels, strict=True)]
    Path("signs.csv").write_text("\n".join(["a,b,c,label", *lines]))
    Path("signs.toml").write_text(
        'algorithm = "fedavg"\nrounds = 6\nengine = "rows"\nmodel = "my_residual:make(width=8)"\n'
        '[data]\nname = "table(path=\'signs.csv\')"\nclients = 3\npartition = "iid"\n'
        "[training]\nlearning_rate = 0.3\nepochs = 5\nbatch_size = 10\n"
    )
    assert main(["run", "signs.toml", "-q"]) == 0
    capsys.readouterr()
    words = ["evaluate", "runs/signs", "signs.csv"]
    assert main(words) == 2
    assert "--trust-code" in capsys.readouterr().err
    assert main([*words, "--trust-code", "--json", "figures.json"]) == 0
    (figures,) = json.loads(Path("figures.json").read_text())["metrics"]
    predicted = fl.load("runs/signs", trust_code=True).predict(pd.read_csv("signs.csv"))
    assert figures["accuracy"] == pytest.approx(np.mean(predicted == labels))
    assert figures["rows"] == 150


def test_from_adapters_of_a_transformer_to_text(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    text = "to be or not to be, that is the question. "
    (tmp_path / "play.txt").write_text(
        "\n\n".join(f"{name}:\n{text * 8}" for name in ("HAMLET", "YORICK"))
    )
    data = f"shakespeare(folder='{tmp_path}', length=16)"
    training = {"optimizer": "adam", "learning_rate": 0.02, "batch_size": 10, "epochs": 20}
    common = {"clients": 0, "partition": "natural", "training": training}
    base = fl.make_task(data, model="transformer(layers=1, width=16, heads=2)", **common)
    pretrained = fl.run("fedavg", base, rounds=3, engine="rows").model
    pretrained.save_pretrained(tmp_path / "base")
    task = fl.make_task(data, model=f"causal_lm(folder='{tmp_path / 'base'}', lora=4)", **common)
    assert task.layout.trainable < base.layout.trainable
    fl.run("fedavg", task, rounds=8, engine="rows", directory=tmp_path / "run")
    model = fl.load(tmp_path / "run")
    written = model.generate("to be or not ", 20)
    assert written.startswith("to be or not ")
    assert len(written) == 33
    assert len(set(written[13:])) > 3
    assert sum(a == b for a, b in zip(written[13:], "to be, that is the q", strict=True)) >= 6
    assert model.generate("to be", 20, temperature=1.0, seed=1) == model.generate(
        "to be", 20, temperature=1.0, seed=1
    )
    assert model.generate("to be", 20, temperature=9.0, seed=1) != model.generate(
        "to be", 20, temperature=9.0, seed=2
    )
    # Like other models, it predicts the next tokens of several texts in one call.
    assert model.predict(["to be or not"]).shape == (1, 16)
    with torch.no_grad():
        assert model.outputs(["to be"]).shape == (1, 16, 82)
