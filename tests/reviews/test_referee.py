"""The referee finds mistakes in plain PyTorch loops of three methods.

It reports no mistakes in correct loops.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import fedloom as fl
from fedloom.common.errors import DataError
from fedloom.recording.run_recording import models_file
from fedloom.reviews.evidence.referee import compare
from fedloom.reviews.evidence.trace import Trace
from forking_cli import main
from json_lines import json_lines
from small_task import KeepsClientMemory, small_task

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "referee"))

loops: Any = __import__("loops")
trace_files: Any = __import__("trace_files")

# Per mistake: round, client, step and tensor of the first difference, and the name among the
# causes.
NAMED = {
    ("fedavg", "order of batches"): (r"round 1, client \d, local step 0: samples", "order of "
                                                                                   "batches"),
    ("fedavg", "momentum kept"): (r"round 2, client \d, local step 0: after hidden.weight", "momentum is kept"),
    ("fedavg", "equal weights"): (r"round 1, the server, .*: model", r"weight of the mean: .* "
                                                                     r"0.333, 0.333, 0.333 in B"),
    ("fedavg", "statistics left"): (r"round 1, the server, .*: model norm.running_mean", "running statistics of batch norm"),
    ("fedavg", "rate does not decay"): (r"round 2, client \d, local step 0: after", "step is "
                                                                                    "1.25 "
                                                                                    "times "
                                                                                    "A's: the "
                                                                                    "learning "
                                                                                    "rate"),
    ("scaffold", "sign"): (r"round 2, client \d, local step 0: after", "variate .*another sign"),
    ("scaffold", "divided by participants"): (r"round 1, the server, .*: variate", "2 times as "
                                                                                   "far "
                                                                                   ".*clients "
                                                                                   "of the round"),
    ("scaffold", "steps of all"): (r"round 1, client \d, what it sends: variate", "a number of "
                                                                                  "steps"),
    ("scaffold", "variate forgotten"): (r"round 2, client \d, local step 0: after", "client's "
                                                                                    "own "
                                                                                    "variate: "
                                                                                    "left out, "
                                                                                    "forgotten"),
    ("scaffold", "server rate"): (r"round 1, the server, .*: model", "0.5 times as far in B: a "
                                                                     "rate of the server"),
    ("fedala", "no blend"): (r"round 2, client \d, local step 0: before out", "0: a local "
                                                                              "initialisation "
                                                                              "is left out"),
    ("fedala", "all layers"): (r"round 2, client \d, .*: before hidden", "A leaves "
                                                                         "hidden.bias, "
                                                                         "hidden.weight as "
                                                                         "they were"),
    ("fedala", "begins anew"): (r"round 3, client \d, local step 0: before out", "blend: begun "
                                                                                 "anew or kept"),
    ("fedala", "not clipped"): (r"round 2, client \d, local step 0: before out", "blend: .*not "
                                                                                 "clipped"),
    ("fedala", "rate of the weights"): (r"round 2, client \d, .*: before out", "blend: "
                                                                               ".*learned with "
                                                                               "another rate"),
}  # fmt: skip


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[fl.Task, Path]]:
    """Record a trace of each method. Return the tasks and the folders."""
    runs = {}
    for method, expression in loops.METHODS.items():
        task, folder = loops.task_for(method), tmp_path_factory.mktemp(method) / "run"
        fl.run(expression, task, rounds=5, participation=0.5, record=["steps"], directory=folder)
        runs[method] = task, folder
    return runs


@pytest.mark.parametrize("method", loops.METHODS)
def test_a_correct_loop_has_no_difference(
    method: str, traces: dict[str, tuple[fl.Task, Path]], tmp_path: Path
) -> None:
    task, folder = traces[method]
    loops.LOOPS[method](task, folder, tmp_path / "loop")
    ours, theirs = Trace(tmp_path / "loop"), Trace(folder)
    assert compare(theirs, ours) == []
    assert ours.keys() == theirs.keys()
    assert main(["paper", "referee", str(folder), str(tmp_path / "loop")]) == 0


def test_five_mistakes_of_each_method_are_planted() -> None:
    assert NAMED.keys() == {
        (method, mistake) for method, mistakes in loops.MISTAKES.items() for mistake in mistakes
    }
    assert all(len(mistakes) == 5 for mistakes in loops.MISTAKES.values())


@pytest.mark.parametrize(("method", "mistake"), NAMED)
def test_a_planted_mistake_is_named(
    method: str,
    mistake: str,
    traces: dict[str, tuple[fl.Task, Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task, folder = traces[method]
    loops.LOOPS[method](task, folder, tmp_path / "loop", mistake)
    location, cause = NAMED[method, mistake]
    assert main(["paper", "referee", str(folder), str(tmp_path / "loop")]) == 1
    printed = capsys.readouterr().out
    assert re.search(f"they differ in {location}", printed), printed
    assert re.search(cause, printed.partition("frequent causes")[2]), printed


@pytest.mark.parametrize("engine", ["rows", "stacked"])
@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "fedmr",
        "scaffold",
        "umf(fedavg)",
        "ditto",
        "ala(fedprox, max_epochs=5)",
        "feddecorr(fedavg)",
    ],
)
def test_a_run_is_the_same_with_recorded_steps(method: str, engine: str, tmp_path: Path) -> None:
    task = small_task()
    plain, recorded = (
        fl.run(
            method,
            task,
            rounds=3,
            participation=0.5,
            engine=engine,
            record=record,
            directory=tmp_path / str(len(record)),
        )
        for record in ([], ["steps(begin=2, end=2)"])
    )
    assert plain.history == recorded.history
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, recorded.model.state_dict()[name])
    trace = Trace(tmp_path / "1")
    assert list(trace.clients) == [2]
    for key in trace:
        if (
            key.role == "after"
            and (following := key._replace(stage=str(int(key.stage) + 1), role="before")) in trace
        ):
            # a second training may start from any model
            sent = trace.get(key._replace(stage="in", role="model"))
            assert np.array_equal(trace[key], trace[following]) or method == "ditto", (key, sent)


def test_steps_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Each recorded step is the gradient of the recorded loss.

    The comparison uses the recorded weights and samples.
    """
    task = loops.task_for("scaffold")
    fl.run("fedavg", task, rounds=2, participation=0.5, record=["steps"], directory=tmp_path)
    trace, net = Trace(tmp_path), loops.Network(norm=False)
    checked = 0
    for key in [key for key in trace if key.role == "samples"]:
        weights = {
            k.tensor: torch.from_numpy(trace[k]).float()
            for k in trace
            if k[:4] == (*key[:3], "before")
        }
        net.load_state_dict(weights)
        index = torch.from_numpy(trace[key])
        assert set(index.tolist()) <= set(task.partition[int(key.client)].tolist())
        loss = torch.nn.functional.cross_entropy(
            net(task.dataset.prepare(task.train.inputs[index])), task.train.labels[index]
        )
        assert trace[key._replace(role="loss")] == pytest.approx(float(loss.detach()), rel=1e-5)
        for name, gradient in zip(
            weights, torch.autograd.grad(loss, [net.get_parameter(n) for n in weights]), strict=True
        ):
            moved = (
                trace[key._replace(role="after", tensor=name)]
                - trace[key._replace(role="before", tensor=name)]
            )
            rate = loops.RATE * loops.DECAY ** (key.round - 1)
            np.testing.assert_allclose(moved, -rate * gradient.numpy(), rtol=1e-3, atol=1e-6)
        checked += 1
    assert checked > 20


def test_a_method_that_trains_while_it_is_evaluated_records_its_training_alone(
    tmp_path: Path,
) -> None:
    fl.run(
        KeepsClientMemory(),
        small_task(),
        rounds=2,
        participation=0.5,
        personal_every=1,
        record=["steps"],
        directory=tmp_path,
    )
    trace = Trace(tmp_path)
    for number, clients in trace.clients.items():
        assert {key.client for key in trace if key.round == number} == {*clients, "server"}
        assert len(clients) == 3


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Write a small trace of another program."""
    writer = trace_files.TraceWriter(tmp_path / "trace")
    for number in (1, 2):
        for client in (0, 1):
            writer.add(client, "in", "model", {"w": np.zeros(3, np.float32)})
            writer.add(client, 0, "samples", np.arange(4) + client)
            writer.add(client, 0, "before", {"w": np.zeros(3, np.float32)})
            writer.add(client, 0, "after", {"w": np.ones(3, np.float32)})
        writer.end(number, [0, 1], [4, 4])
    return tmp_path / "trace"


def test_the_copied_file_reads_what_it_writes(written: Path) -> None:
    rounds = list(trace_files.read_trace(written))
    assert [(number, clients, sizes) for number, clients, sizes, _ in rounds] == [
        (1, [0, 1], [4, 4]),
        (2, [0, 1], [4, 4]),
    ]
    assert trace_files.tensors_of(rounds[0][3], 1, 0, "after")["w"].tolist() == [1, 1, 1]
    assert len((ROOT / "examples/referee/trace_files.py").read_text().splitlines()) < 90


def change(folder: Path, number: int, **arrays: Any) -> Path:
    """Return a copy of a trace with other arrays in a round. None removes an array."""
    copied = folder.with_name("changed")
    shutil.copytree(folder, copied)
    path = models_file(copied, number)
    tensors = load_file(path) | {name.replace("__", "/"): array for name, array in arrays.items()}
    save_file({name: array for name, array in tensors.items() if array is not None}, path)
    return copied


def test_differing_steps_and_clients_are_named(written: Path) -> None:
    extra_step = change(written, 2, steps__1__1__loss=np.zeros(()))
    difference = compare(Trace(written), Trace(extra_step))
    assert difference[:2] == ["round 2, client 1", "A takes 1 local steps, B 2"]
    lines = json_lines(extra_step / "recorded.jsonl")
    lines[0]["values"]["steps"]["clients"] = [0, 5]
    (extra_step / "recorded.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    difference = compare(Trace(written), Trace(extra_step))
    assert difference[:2] == ["round 1", "A trains clients 0, 1, B 0, 5"]


@pytest.mark.parametrize(
    "arrays",
    [
        {"steps__0__0__after__w": np.ones(4, np.float32)},
        {"steps__0__0__after__w": np.full(3, np.nan, np.float32)},
        {"steps__0__0__samples": np.arange(9)},
        {"steps__0__in__model__w": np.ones(3, np.float32)},
    ],
)
def test_odd_tensors_are_differences(arrays: dict[str, Any], written: Path) -> None:
    difference = compare(Trace(written), Trace(change(written, 1, **arrays)))
    assert difference[0].startswith("round 1, client 0")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 100, (1 << 40).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"{}"],
)
def test_a_damaged_trace_is_refused_in_one_line(
    content: bytes, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models_file(written, 2).write_bytes(content)
    if content[:1] != b"\x02":  # b"\x02" is an empty file of tensors
        with pytest.raises(DataError, match="is no file of a trace"):
            Trace(written)
        assert main(["paper", "referee", str(written), str(written)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    (written / "recorded.jsonl").write_text(
        '{"round": 1, "values": {"steps": {"clients": "ab"}}}\n'
    )
    with pytest.raises(DataError, match="is no file of a trace"):
        Trace(written)
    (written / "recorded.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no trace"):
        Trace(written)


def test_traces_without_a_common_tensor_are_refused(written: Path) -> None:
    unrelated = written.with_name("other")
    writer = trace_files.TraceWriter(unrelated)
    writer.add(0, "in", "model", {"module.w": np.zeros(3, np.float32)})
    writer.end(1, [0], [4])
    with pytest.raises(
        DataError, match=r"no tensor in common, such as .*after/w and 1/0/in/model/module.w"
    ):
        compare(Trace(written), Trace(unrelated))


def two_rounds(folder: Path, **changes: Any) -> Path:
    """Write a trace of two rounds with two clients. `changes` replaces arrays by key."""
    rng = np.random.default_rng(0)
    writer = trace_files.TraceWriter(folder)
    start = [rng.normal(size=6), rng.normal(size=6), rng.normal(size=6)]
    losses = {0: 2.0, 1: 0.7}
    for number in (1, 2):
        for client in (0, 1):
            ways = {0: rng.normal(size=6), 1: rng.normal(size=6)}
            values = {
                "before": start[number - 1],
                "loss": losses[client],
                "after": start[number - 1] + ways[client],
                "out": start[number - 1] + ways[client],
            }
            for name in values:
                change = changes.get(f"{name}_{number}", lambda value, client, start: value)
                values[name] = change(values[name], client, start)
            sent = {"w": start[number - 1].astype(np.float32)}
            writer.add(client, "in", "model", sent)
            writer.add(client, 0, "samples", np.arange(4) + 10 * client)
            writer.add(client, 0, "before", {"w": values["before"].astype(np.float32)})
            writer.add(client, 0, "loss", np.float32(values["loss"]).reshape(()))
            writer.add(client, 0, "after", {"w": values["after"].astype(np.float32)})
            writer.add(client, "out", "model", {"w": values["out"].astype(np.float32)})
        end = changes.get(f"end_{number}", lambda value, client, start: value)
        state = end(start[number], -1, start)
        writer.add("server", "end", "model", {"w": state.astype(np.float32)})
        writer.end(number, [0, 1], [4, 4])
    return folder


@pytest.mark.parametrize(
    ("changes", "location", "cause"),
    [
        ({"loss_1": lambda loss, client, start: 4 * loss}, "loss", "a sum in place of a mean"),
        ({"loss_1": lambda loss, client, start: 1.3 * loss}, "loss", "the loss is 1.3 times A's"),
        ({"loss_1": lambda loss, client, start: loss + 0.1}, "loss", "a term of the loss"),
        ({"loss_1": lambda loss, client, start: loss + 0.1 * (client + 1)}, "loss", "a term of "
                                                                                    "the loss"),
        ({"loss_1": lambda loss, client, start: loss + (client == 0)}, "loss", "batch norm in "
                                                                               "evaluation mode"),
        ({"after_1": lambda w, client, start: start[0] + 1.9 * (w - start[0])}, "local step 0", "Nesterov momentum"),
        ({"out_1": lambda w, client, start: w - start[0]}, "what it sends", "B sends the "
                                                                            "difference"),
        (
            {"end_2": lambda w, client, start: w + 0.9 * (start[1] - start[0])},
            "the server", "0.9 times the server's step of the round before: momentum",
        ),
        (
            {"end_1": lambda w, client, start: start[0] + 1.9 * (w - start[0])},
            "the server", "1.9 times as far in B: .*Nesterov momentum",
        ),
    ],
)  # fmt: skip
def test_causes_in_small_traces_are_named(
    changes: dict[str, Any], location: str, cause: str, tmp_path: Path
) -> None:
    traces = Trace(two_rounds(tmp_path / "a")), Trace(two_rounds(tmp_path / "b", **changes))
    difference = compare(*traces)
    assert location in difference[0], difference
    assert re.search(cause, " ".join(difference[2:])), difference
    if "+" in str(cause) or cause.startswith(("a term", "batch")):
        assert "sum in place" not in " ".join(difference[2:])
