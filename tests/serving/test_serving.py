"""A trained model in use: loading with preprocessing, prediction and export.

The tests use Python and the command line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.common.errors import CheckpointError, FedloomError, InvalidValue
from fedloom.data.preprocessing import ModelOutputs, TextInputs
from fedloom.serving.exporting import SUFFIXES
from fedloom.serving.prediction_files import predict_file, prediction_columns
from forking_cli import main

TRAINING = {"learning_rate": 0.1, "batch_size": 10, "epochs": 5}


def patients(rows: int = 80) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"age": draw.integers(20, 90, rows), "ward": draw.choice(["east", "north"], rows)}
    )
    frame["cost"] = 400.5 + 3 * frame.age + 40 * (frame.ward == "north")
    frame["outcome"] = np.where(frame.cost > 560, "ill", "well")
    return frame


def trained(folder: Path, frame: pd.DataFrame, target: str, **options: Any) -> fl.Result:
    model = options.pop("model", "logistic")
    task = fl.make_task(
        frame,
        target=target,
        clients=3,
        partition="iid",
        model=model,
        local_test=0.25,
        training=TRAINING,
    )
    return fl.run(
        options.pop("algorithm", "fedavg"),
        task,
        rounds=8,
        directory=folder,
        engine="rows",
        **options,
    )


def test_a_classifier_predicts_the_names_of_classes(tmp_path: Path) -> None:
    frame = patients().drop(columns=["cost"])
    result = trained(tmp_path, frame, "outcome")
    model = fl.load(tmp_path)
    assert model.classes == ("ill", "well")
    rows = frame.drop(columns=["outcome"])
    predicted, probabilities = model.predict(rows), model.predict_proba(rows)
    assert predicted.tolist() == [model.classes[k] for k in probabilities.argmax(1)]
    assert np.allclose(probabilities.sum(1), 1)
    assert (predicted == frame.outcome.to_numpy()).mean() > 0.9
    # On the test rows, the accuracy equals the accuracy of the run.
    task = result.task
    with torch.no_grad():
        accuracy = (model.module(task.test.inputs).argmax(1) == task.test.labels).double().mean()
    assert float(accuracy) == pytest.approx(result.accuracy)


def test_a_regression_predicts_in_the_units_of_its_target(tmp_path: Path) -> None:
    frame = patients().drop(columns=["outcome"])
    result = trained(tmp_path, frame, "cost")
    predicted = fl.load(tmp_path).predict(frame.drop(columns=["cost"]))
    assert predicted.shape == (80,)
    assert np.abs(predicted - frame.cost).max() < 20
    record = result.history[-1]
    assert record["rmse"] < 20 < 400 < frame.cost.min()
    # The figures and the predictions have the same units.
    task, objective = result.task, result.task.objective
    outputs = result.model(task.test.inputs)[:, 0].detach()
    errors = objective.in_units(outputs) - objective.in_units(task.test.labels)
    assert float(errors.square().mean().sqrt()) == pytest.approx(record["rmse"], rel=1e-4, abs=1e-3)
    assert float(errors.abs().mean()) == pytest.approx(record["mae"], rel=1e-4, abs=1e-3)
    with pytest.raises(InvalidValue, match="predict_proba is for classes"):
        fl.load(tmp_path).predict_proba(frame)


def test_metrics_of_the_users_get_the_units_of_the_target() -> None:
    frame = patients().drop(columns=["outcome"])
    targets_seen: list[float] = []

    def largest(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        targets_seen.append(float(targets.max()))
        return float(outputs.max())

    task = fl.make_task(
        frame, target="cost", clients=2, partition="iid", model="logistic", metrics=[largest]
    )
    fl.run("fedavg", task, rounds=1, engine="rows")
    assert max(targets_seen) > 400


def test_a_module_of_ones_own_is_given_to_load_and_predicts_arrays(tmp_path: Path) -> None:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Flatten(), nn.Linear(64, 10))

    task = fl.make_task("digits", clients=3, model=Net(), training=TRAINING)
    fl.run("fedavg", task, rounds=1, directory=tmp_path, engine="rows")
    with pytest.raises(CheckpointError, match=r"its model is your own \(Net\): give it as module="):
        fl.load(tmp_path)
    model = fl.load(tmp_path, module=Net())
    predicted = model.predict(task.test.inputs.numpy()[:7])
    assert predicted.dtype == np.int64
    assert predicted.tolist() == model.module(task.test.inputs[:7]).argmax(1).tolist()
    assert model.predict(task.test.inputs[0]).tolist() == predicted[:1].tolist()
    for wrong in (np.zeros((2, 9)), "x.png", {"a": 1}, None, np.full((1, 1, 8, 8), np.nan)):
        with pytest.raises(FedloomError) as caught:
            model.predict(wrong)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["ditto", "fedavg_c"])
def test_a_clients_personal_model_has_the_measured_accuracy(method: str, tmp_path: Path) -> None:
    frame = patients().drop(columns=["cost"])
    result = trained(tmp_path, frame, "outcome", algorithm=method)
    task, table = result.task, result.federation.client_history[-1]["personal"]
    assert task.local_test is not None
    for client, measured in zip(table["clients"], table["accuracy"], strict=True):
        model = fl.load(tmp_path, client=client)
        index = torch.from_numpy(task.local_test[client])
        hits = model.module(task.train.inputs[index]).argmax(1) == task.train.labels[index]
        assert float(hits.double().mean()) == pytest.approx(measured)
    with pytest.raises(
        InvalidValue, match=r"client=9: .* has no such personal model \(there are: 0, 1, 2\)"
    ):
        fl.load(tmp_path, client=9)


def test_a_finished_run_notices_that_its_preprocessing_was_changed(tmp_path: Path) -> None:
    frame = patients().drop(columns=["cost"])
    trained(tmp_path, frame, "outcome")
    path = tmp_path / "preprocessing.json"
    path.write_text(path.read_text().replace("north", "south"))
    with pytest.raises(FedloomError, match="changed since it was written"):
        fl.load(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"preprocessing\.json has changed since it was written"
    ):
        trained(tmp_path, frame, "outcome")


@pytest.mark.parametrize("to", list(SUFFIXES))
def test_the_exported_model_has_the_outputs_of_the_model(to: Any, tmp_path: Path) -> None:
    if to == "onnx":
        pytest.importorskip("onnxscript")
        runtime = pytest.importorskip("onnxruntime")
    frame = patients().drop(columns=["outcome"])
    trained(tmp_path, frame, "cost", model="mlp(hidden=[4])")
    model = fl.load(tmp_path)
    rows = frame.drop(columns=["cost"])
    path = model.export(to, tmp_path / f"out{SUFFIXES[to]}")
    assert model.export(to) == tmp_path / f"exported{SUFFIXES[to]}"
    inputs = model.preprocessing.apply(rows)[0].float()
    if to == "onnx":
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        outputs = session.run(None, {"inputs": inputs.numpy()})[0]
        metadata = session.get_modelmeta().custom_metadata_map
    elif to == "torch":
        metadata = {"preprocessing": ""}
        outputs = torch.export.load(path, extra_files=metadata).module()(inputs).detach().numpy()
    else:
        module = fl.load_model(path, model.module)
        outputs = model.preprocessing.outputs.in_units(module(inputs)).detach().numpy()
        metadata = {"preprocessing": model.preprocessing.to_json()}
    assert outputs[:, 0].tolist() == pytest.approx(model.predict(rows).tolist(), rel=1e-4, abs=1e-3)
    read = metadata["preprocessing"]
    assert fl.Preprocessing.from_json(read) == model.preprocessing


def test_the_command_predicts_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = patients().drop(columns=["cost"])
    trained(tmp_path / "run", frame, "outcome")
    frame.drop(columns=["outcome"]).to_csv("new.csv", index=False)
    frame.rename(columns={"age": "years"}).to_csv("odd.csv", index=False)
    assert main(["predict", "run", "new.csv"]) == 0
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert lines[0] == '"age","ward","prediction"'
    expected = fl.load("run").predict(frame.drop(columns=["outcome"])).tolist()
    assert [line.split(",")[2].strip('"') for line in lines[1:]] == expected
    assert main(["predict", "run", "new.csv", "--to", "out.parquet", "--probabilities"]) == 0
    written = pd.read_parquet("out.parquet")
    assert list(written) == [
        "age",
        "ward",
        "prediction",
        "probability of ill",
        "probability of well",
    ]
    assert written.prediction.tolist() == expected
    assert main(["export", "run", "--to", "safetensors", "--output", "m.safetensors"]) == 0
    assert Path("m.safetensors").exists()
    for words, line in (
        (["predict", "run", "odd.csv"], "no column 'age', which the model was trained on"),
        (
            ["predict", "run", "new.csv", "--to", "out.xls"],
            "predictions are written as .csv, .parquet or .npz",
        ),
        (
            ["predict", "run", "new.csv", "--client", "1"],
            "client=1: run has no such personal model",
        ),
        (
            ["predict", "nowhere", "new.csv"],
            "nowhere must be or contain one finished run (there are: none)",
        ),
        (["export", "run", "--to", "onx"], "--to 'onx' is not allowed: did you mean 'onnx'?"),
    ):
        capfdbinary.readouterr()
        assert main(words) == 2
        error = capfdbinary.readouterr().err.decode()
        assert line in error.splitlines()[-1]


def test_texts_in_a_file_get_a_class_or_a_continuation_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"sport": ["goal", "team"], "money": ["bank", "price"]}
    draw = np.random.default_rng(0)
    topics = draw.choice(list(words), 60)
    rows = pd.DataFrame(
        {"text": [" ".join(draw.choice(words[topic], 5)) for topic in topics], "topic": topics}
    )
    trained(tmp_path / "topics", rows, "topic", model="fasttext")
    Path("new.txt").write_text("goal team goal\nbank, price\n")
    assert main(["predict", "topics", "new.txt", "--to", "out.csv", "--probabilities"]) == 0
    written = pd.read_csv("out.csv")
    assert list(written) == ["text", "prediction", "probability of money", "probability of sport"]
    assert written.text.tolist() == ["goal team goal", "bank, price"]
    model = fl.load("topics")
    assert written.prediction.tolist() == model.predict(["goal team goal", "bank, price"]).tolist()
    np.testing.assert_allclose(
        written.iloc[:, 2:], model.predict_proba(["goal team goal", "bank, price"]), rtol=1e-5
    )
    Path("play.txt").write_text(
        "\n\n".join(f"{name}:\n{'to be or not. ' * 8}" for name in ("HAMLET", "YORICK"))
    )
    data = f"shakespeare(folder='{tmp_path}', length=8)"
    task = fl.make_task(
        data,
        clients=0,
        partition="natural",
        model="transformer(layers=1, width=8, heads=2)",
        training=TRAINING,
    )
    fl.run("fedavg", task, rounds=1, directory="plays", engine="rows")
    assert main(["predict", "plays", "new.txt", "--to", "next.npz", "--tokens", "7"]) == 0
    model = fl.load("plays")
    expected = [model.generate(line, 7)[len(line) :] for line in ("goal team goal", "bank, price")]
    assert np.load("next.npz")["prediction"].tolist() == expected
    assert all(len(text) == 7 for text in expected)
    Path("gap.txt").write_text("to be\n\nor not\n")
    capfdbinary.readouterr()
    assert main(["predict", "plays", "gap.txt"]) == 2
    assert b"gap.txt: line 2 is empty: write one text per line" in capfdbinary.readouterr().err


def test_arrays_in_a_file_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    task = fl.make_task("digits", clients=3, model="logistic", training=TRAINING)
    fl.run("fedavg", task, rounds=2, directory="run", engine="rows")
    inputs, model = task.test.inputs[:7].double().numpy(), fl.load("run")
    np.savez("new.npz", inputs=inputs, labels=task.test.labels[:7].numpy())
    assert main(["predict", "run", "new.npz"]) == 0
    lines = capfdbinary.readouterr().out.decode().splitlines()
    expected = model.predict(inputs.astype(np.float32)).tolist()
    assert lines == ['"sample","prediction"', *(f"{k},{digit}" for k, digit in enumerate(expected))]
    assert main(["predict", "run", "new.npz", "--to", "out.npz", "--probabilities"]) == 0
    written = np.load("out.npz")
    assert written["prediction"].tolist() == expected
    np.testing.assert_allclose(
        written["probability"], model.predict_proba(inputs.astype(np.float32))
    )
    np.savez("flat.npz", inputs=inputs.reshape(7, -1))
    np.savez("other.npz", x=inputs)
    np.savez("none.npz", inputs=inputs[:0])
    Path("broken.npz").write_bytes(Path("new.npz").read_bytes()[:200])
    for name, line in (
        (
            "flat",
            "flat.npz: the model was trained on [n, 1, 8, 8] of float32, not on [7, 64] of float32",
        ),
        ("other", "other.npz: no array 'inputs' (it has: x)"),
        ("none", "none.npz: no samples to predict"),
        ("broken", "broken.npz: damaged, or neither an npz file nor a folder of npy files"),
    ):
        capfdbinary.readouterr()
        assert main(["predict", "run", f"{name}.npz"]) == 2
        error = capfdbinary.readouterr().err.decode()
        assert line in error
        assert len(error.splitlines()) == 1


def test_several_answers_to_a_sample_are_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(40, 4)).astype(np.float32)
    labels = (inputs[:, :3] > 0).astype(np.int64)
    task = fl.make_task(
        fl.Samples(inputs, labels),
        clients=2,
        partition="iid",
        model="logistic",
        objective="multilabel",
        training=TRAINING,
    )
    fl.run("fedavg", task, rounds=1, directory="run", engine="rows")
    np.savez("new.npz", inputs=inputs[:5])
    assert main(["predict", "run", "new.npz", "--to", "out.csv", "--probabilities"]) == 0
    written, model = pd.read_csv("out.csv"), fl.load("run")
    assert list(written)[1:4] == [f"prediction of {name}" for name in model.classes]
    assert written.iloc[:, 1:4].to_numpy().tolist() == model.predict(inputs[:5]).tolist()
    np.testing.assert_allclose(written.iloc[:, 4:], model.predict_proba(inputs[:5]), rtol=1e-5)
    answers = np.zeros((3, 8, 8), np.int64)
    with pytest.raises(
        InvalidValue, match=r"predictions of shape \[8, 8\] do not fit in a row: use --to FILE.npz"
    ):
        prediction_columns(model, {"prediction": answers})


def test_the_model_card_describes_the_data_without_them(tmp_path: Path) -> None:
    result = trained(tmp_path, patients().drop(columns=["cost"]), "outcome", algorithm="ditto")
    card = (tmp_path / "model-card.md").read_text()
    for line in (
        "# `logistic` trained by `ditto`", "- input `age`: numbers", "- input `ward`: `east`, "
                                                                     "`north`",
        "- output `outcome`: `ill`, `well`", "- no differential privacy was asked for",
        f"- accuracy: {result.accuracy:.4g}",
    ):  # fmt: skip
        assert f"{line}\n" in card
    assert "- personal accuracy, client by client: " in card
    assert "(3 clients)" in card
    (tmp_path / "model-card.md").write_text("perfect")
    with pytest.raises(CheckpointError, match=r"model-card\.md has changed since it was written"):
        trained(tmp_path, patients().drop(columns=["cost"]), "outcome", algorithm="ditto")


def test_a_folder_of_an_experiment_with_one_run_is_that_run(tmp_path: Path) -> None:
    frame = patients().drop(columns=["cost"])
    for seed in (0, 1):
        trained(tmp_path / "mine" / "fedavg" / f"seed-{seed}", frame, "outcome")
        if not seed:
            assert fl.load(tmp_path / "mine").classes == ("ill", "well")
    with pytest.raises(
        InvalidValue, match=r"contain one finished run \(there are: .*seed-0, .*seed-1\)"
    ):
        fl.load(tmp_path / "mine")


def test_preprocessing_is_written_as_json_alone(tmp_path: Path) -> None:
    result = trained(tmp_path, patients().drop(columns=["cost"]), "outcome")
    values = json.loads((tmp_path / "preprocessing.json").read_text())
    assert values["digest"] == result.task.dataset.preprocessing.digest
    assert [column["name"] for column in values["inputs"]["columns"]] == ["age", "ward"]


def test_a_continuation_ends_before_the_token_that_ends_texts(tmp_path: Path) -> None:
    """Check a model that predicts the word after each word, and the end after the third."""

    class Next(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot((inputs + 1).clamp(max=5), 6).float()

    words = ("one", "two", "three", "</s>")
    outputs = ModelOutputs("token", classes=())
    model = fl.Predictor(Next(), fl.Preprocessing(TextInputs(words, 8), outputs))
    assert model.generate("one", 9) == "one two three"
    assert model.generate("one", 1) == "one two"
    unending = fl.Preprocessing(TextInputs((*words[:3], "four"), 8), outputs)
    assert fl.Predictor(Next(), unending).generate("one", 5) == "one two three four four four"
    Path(tmp_path / "lines.txt").write_text("one\ntwo\n")
    predict_file(model, tmp_path / "lines.txt", tmp_path / "next.npz", tokens=9)
    assert np.load(tmp_path / "next.npz")["prediction"].tolist() == [" two three", " three"]
