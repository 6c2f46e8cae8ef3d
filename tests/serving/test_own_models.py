"""A run whose model is the user's: load, predict and export by its path, if its code is trusted."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.common.errors import CheckpointError, InvalidValue
from forking_cli import main, saying

MODULE = """
from torch import nn


def make(spec, width=4):
    return nn.Sequential(
        nn.Conv2d(spec.shape[0], width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(),
        nn.Linear(36 * width, spec.outputs),
    )
"""
MODEL = "my_res:make(width=8)"
REFUSAL = r"its model is your own \(my_res:make\(width=8\)\): trust_code=True \(--trust-code\) impo"


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fl.Result:
    """Train the model of a module in the current folder, which is imported by nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_res", raising=False)
    Path("my_res.py").write_text(MODULE)
    training = {"learning_rate": 0.1}
    task = fl.make_task("digits", clients=3, partition="iid", model=MODEL, training=training)
    return fl.run("fedavg", task, rounds=2, directory="run", engine="rows", quiet=True)


def test_a_model_is_imported_by_its_path_only_if_its_code_is_trusted(result: fl.Result) -> None:
    inputs = result.task.test.inputs[:30]
    with pytest.raises(CheckpointError, match=REFUSAL):
        fl.load("run")
    model = fl.load("run", trust_code=True)
    with torch.no_grad():
        expected = result.model(inputs)
        assert torch.equal(model.module(inputs), expected)
    assert model.predict(inputs.numpy()).tolist() == expected.argmax(1).tolist()
    assert torch.equal(fl.load_model("run", trust_code=True)(inputs), expected)


def test_trusting_code_does_not_hide_what_is_wrong_with_it(result: fl.Result) -> None:
    sys.modules["my_res"].make = lambda spec: torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="cannot be built again: model 'my_res:make"):
        fl.load("run", trust_code=True)


def test_the_commands_use_it_with_trust_code(
    result: fl.Result, capsys: pytest.CaptureFixture[str]
) -> None:
    say = saying(capsys)
    inputs = result.task.test.inputs[:30]
    np.savez("new.npz", inputs=inputs.numpy())
    for words in (("predict", "run", "new.npz"), ("export", "run", "--to", "torch")):
        code, _, error = say(*words)
        assert code == 2
        assert "--trust-code" in error
    assert main(["predict", "run", "new.npz", "--to", "out.npz", "--trust-code"]) == 0
    expected = result.model(inputs).argmax(1).tolist()
    assert np.load("out.npz")["prediction"].tolist() == expected
    code, out, _ = say("export", "run", "--to", "torch", "--trust-code")
    assert (code, out.strip()) == (0, "run/exported.pt2")
    exported = torch.export.load("run/exported.pt2").module()(inputs)
    assert exported.argmax(1).tolist() == expected


def test_the_model_of_a_run_is_exported_to_onnx_without_warnings(
    result: fl.Result, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    with caplog.at_level(logging.WARNING):
        path = fl.load("run", trust_code=True).export("onnx")
    assert path == Path("run/exported.onnx")
    assert [record.getMessage() for record in caplog.records] == []
    assert [str(warning.message) for warning in recwarn] == []
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = result.task.test.inputs[:30]
    outputs = session.run(None, {"inputs": inputs.numpy()})[0]
    assert outputs == pytest.approx(result.model(inputs).detach().numpy(), rel=1e-3, abs=1e-3)
    with pytest.raises(InvalidValue, match="to 'onx' is not allowed: did you mean 'onnx'"):
        fl.load("run", trust_code=True).export("onx")  # type: ignore[arg-type]
