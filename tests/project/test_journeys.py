"""Complete user workflows, from a data file to predictions of the trained model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
