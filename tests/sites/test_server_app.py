"""The server app over Flower's messages: the run directory, resumption after a kill, and sites with
separate data.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.exit import signal_handler
from flwr.supercore.telemetry import EventType
from torch import Tensor

from fedloom.common.errors import CheckpointError, DataError, InvalidValue
from fedloom.data.dataset import Samples, make_dataset
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.runs.configured import run_configured
from fedloom.runs.events import RunName
from fedloom.serving.artifact import load_model
from fedloom.sites import server_app
from fedloom.sites.agreement import deployment
from fedloom.sites.gathering import Gathering
from fedloom.sites.messages import Mailbox
from fedloom.sites.node_config import NodeConfig
from fedloom.sites.site import Site
from fedloom.sites.site_data import DataAgreement, own_data
from fedloom.state.tensors import read_tensors
from fedloom.study.comparison_result import read_comparison
from flower_support import CLIENTS, RUN, LocalGrid, NormNet, nodes, run_config, schedule, site
from json_lines import json_lines
from server_support import give_data, own_task

PAUSE = 0.01


def surest(outputs: Tensor, labels: Tensor) -> Tensor:
    """A user metric that is not additive over samples."""
    return outputs.softmax(1).amax(1).median()


def test_a_run_leaves_what_a_run_on_one_machine_leaves(tmp_path: Path) -> None:
    config = run_config("fedper", tmp_path / "sites")
    metrics = """metrics = ["f1(average='macro')", "sites.test_server_app:surest"]\n"""
    config["configuration"] = f"targets = [0.01]\n{metrics}{config['configuration']}"
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    server_app.app(grid, Context(RUN, 1, {}, RecordDict(), config))
    settings = deployment(config)
    name = RunName("fedper", 3)
    run_configured(settings.configuration, name, lambda _: None, path=tmp_path / "here")
    for file in (
        "metrics.jsonl",
        "clients.jsonl",
        "configuration.json",
        "task.json",
        "split.npz",
        "result.json",
    ):
        assert (tmp_path / "sites" / file).exists()
        assert (tmp_path / "here" / file).exists()
    assert "fedper" in (tmp_path / "sites" / "report.html").read_text()
    # Only real sites report the seconds to a target on the real clock. In a simulation on one
    # machine, these seconds do not describe the method.
    pages = [
        read_comparison(tmp_path / folder).rewrite_reports()[0] for folder in ("sites", "here")
    ]
    assert ["Seconds to" in page.read_text() for page in pages] == [True, False]
    for name_, tensor in read_tensors(tmp_path / "here" / "model.safetensors")[0].items():
        torch.testing.assert_close(
            read_tensors(tmp_path / "sites" / "model.safetensors")[0][name_], tensor
        )
    load_model(tmp_path / "sites", NormNet())
    at_sites, on_one_machine = (
        json_lines(tmp_path / folder / "metrics.jsonl") for folder in ("sites", "here")
    )
    assert [record["bytes_up"] for record in at_sites] == [
        record["bytes_up"] for record in on_one_machine
    ]
    judged = [
        {
            name: value
            for name, value in records[-1].items()
            if "f1_macro" in name or "surest" in name
        }
        for records in (at_sites, on_one_machine)
    ]
    assert judged[0] == pytest.approx(judged[1], rel=1e-4)
    assert {
        f"{prefix}{name}"
        for prefix in ("", "client_", "personal_")
        for name in ("f1_macro", "surest")
    } <= {*judged[0]}
    sent = len(grid.sent)
    server_app.serve(grid, config, PAUSE)  # the run is finished, so no site receives a message
    assert len(grid.sent) == sent


class Killed(BaseException):
    """Ends the server."""


class Mortal(LocalGrid):
    """Kills the server at its first message of round `deadly` and copies its disk to `grave`."""

    deadly: int
    output: Path
    grave: Path

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        if sent[0].metadata.message_type == "train" and sent[0].metadata.group_id == str(
            self.deadly
        ):
            shutil.copytree(self.output, self.grave)
            raise Killed
        return super().push_messages(sent)


@pytest.mark.parametrize("algorithm", ["scaffold", "fedmr"])
def test_a_server_that_is_killed_goes_on_from_its_checkpoint(
    algorithm: str, tmp_path: Path
) -> None:
    """A killed server resumes from its checkpoint, although sites trained later rounds and return
    with new ids.
    """
    config = run_config(algorithm, tmp_path / "run", rounds=6)
    config["configuration"] = config["configuration"].replace(
        "rounds = 6", "rounds = 6\ncheckpoint_every = 2"
    )
    grid = Mortal(nodes(CLIENTS, tmp_path / "memory"), config)
    grid.deadly, grid.output, grid.grave = 4, tmp_path / "run", tmp_path / "grave"
    with pytest.raises(Killed):
        server_app.serve(grid, config, PAUSE)
    # Undo later writes of the dying server, which a killed server would not make.
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "grave").rename(tmp_path / "run")
    assert len(json_lines(tmp_path / "run" / "metrics.jsonl")) == 3
    renamed = LocalGrid({number + 9000: node for number, node in grid.nodes.items()}, config)
    server_app.serve(renamed, config, PAUSE)
    untouched = {**config, "output": str(tmp_path / "whole")}
    server_app.serve(LocalGrid(nodes(CLIENTS, tmp_path / "other"), untouched), untouched, PAUSE)
    assert json_lines(tmp_path / "run" / "metrics.jsonl") == json_lines(
        tmp_path / "whole" / "metrics.jsonl"
    )
    assert not any(record["faults"] for record in json_lines(tmp_path / "run" / "metrics.jsonl"))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_a_federation_ends_early_in_the_round_of_a_simulation_and_goes_on_with_more_patience(
    tmp_path: Path,
) -> None:
    def config(output: str, evaluations: int) -> dict[str, Any]:
        settings = run_config("fedavg", tmp_path / output, rounds=25)
        text = settings["configuration"].replace(
            "evaluate_every = 5", "evaluate_every = 1\ncheckpoint_every = 1"
        )
        text = text.replace("steps = 2", "steps = 10")
        return {**settings, "configuration": f"{text}\n[stop]\nevaluations = {evaluations}\n"}

    log, folder = tmp_path / "run" / "metrics.jsonl", tmp_path / "here"
    run_configured(
        deployment(config("run", 2)).configuration,
        RunName("fedavg", 3),
        lambda _: None,
        path=folder,
    )
    rounds = len(json_lines(folder / "metrics.jsonl"))
    assert 3 < rounds < 25
    grid = Mortal(nodes(CLIENTS, tmp_path / "memory"), config("run", 2))
    grid.deadly, grid.output, grid.grave = rounds - 1, tmp_path / "run", tmp_path / "grave"
    with pytest.raises(Killed):
        server_app.serve(grid, grid.run_config, PAUSE)
    restarted = LocalGrid(grid.nodes, grid.run_config)
    server_app.serve(restarted, restarted.run_config, PAUSE)
    assert [record["round"] for record in json_lines(log)] == list(range(1, rounds + 1))
    assert [record["accuracy"] for record in json_lines(log)] == pytest.approx(
        [record["accuracy"] for record in json_lines(folder / "metrics.jsonl")], abs=1e-6
    )
    assert {
        message.metadata.group_id
        for message in restarted.sent
        if message.metadata.message_type == "train"
    } == {str(number) for number in range(rounds - 1, rounds + 1)}
    sent = len(restarted.sent)
    server_app.serve(restarted, restarted.run_config, PAUSE)  # finished: no messages to sites
    assert len(restarted.sent) == sent
    patient = LocalGrid(grid.nodes, config("run", 4))
    server_app.serve(patient, patient.run_config, PAUSE)
    assert rounds < len(json_lines(log)) < 25


class Interrupted(LocalGrid):
    """Sends SIGTERM to the server process in its messages of round 4."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        if (sent[0].metadata.message_type, sent[0].metadata.group_id) == ("train", "4"):
            signal.raise_signal(signal.SIGTERM)
        return super().push_messages(sent)


def test_a_server_that_is_sent_sigterm_saves_the_last_finished_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server saves the last finished round on SIGTERM, although Flower's handler calls
    `sys.exit`.
    """
    monkeypatch.setattr(signal_handler, "flwr_exit", lambda **_: sys.exit(0))
    handlers = {number: signal.getsignal(number) for number in signal_handler.SIGNAL_TO_EXIT_CODE}
    config = run_config("scaffold", tmp_path / "run", rounds=6)  # one checkpoint, at the end
    sites = nodes(CLIENTS, tmp_path / "memory")
    try:
        signal_handler.register_signal_handlers(EventType.FLWR_SERVERAPP_RUN_LEAVE)
        with pytest.raises(SystemExit):
            server_app.serve(Interrupted(sites, config), config, PAUSE)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [
        "checkpoint-0000003.safetensors"
    ]
    server_app.serve(LocalGrid(sites, config), config, PAUSE)
    untouched = {**config, "output": str(tmp_path / "whole")}
    server_app.serve(LocalGrid(nodes(CLIENTS, tmp_path / "other"), untouched), untouched, PAUSE)
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_another_configuration_does_not_go_on_in_the_same_folder(tmp_path: Path) -> None:
    config = run_config("fedavg", tmp_path / "run", rounds=1)
    server_app.serve(LocalGrid(nodes(CLIENTS, tmp_path), config), config, PAUSE)
    changed = run_config("fedprox", tmp_path / "run", rounds=1)
    with pytest.raises(
        CheckpointError, match="holds a run with algorithm = 'fedavg', not 'fedprox'"
    ):
        server_app.serve(LocalGrid(nodes(CLIENTS, tmp_path), changed), changed, PAUSE)


def test_a_finished_run_is_lengthened_with_what_its_sites_remember(tmp_path: Path) -> None:
    """A finished run is lengthened with the memory of its sites; both lengths evaluate round 5."""
    shorter, longer = (run_config("scaffold", tmp_path / "run", rounds) for rounds in (5, 8))
    sites = nodes(CLIENTS, tmp_path / "memory")
    server_app.serve(LocalGrid(sites, shorter), shorter, PAUSE)
    server_app.serve(LocalGrid(sites, longer), longer, PAUSE)
    uninterrupted = {**longer, "output": str(tmp_path / "whole")}
    server_app.serve(
        LocalGrid(nodes(CLIENTS, tmp_path / "other"), uninterrupted), uninterrupted, PAUSE
    )
    assert json_lines(tmp_path / "run" / "metrics.jsonl") == json_lines(
        tmp_path / "whole" / "metrics.jsonl"
    )
    model, expected = (tmp_path / folder / "model.safetensors" for folder in ("run", "whole"))
    assert model.read_bytes() == expected.read_bytes()


def test_sites_that_do_not_come_are_named(tmp_path: Path) -> None:
    config = run_config("fedavg", tmp_path / "run", wait=0.05)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    site(grid, 1).online = site(grid, 4).online = False
    with pytest.raises(
        InvalidValue, match=r"4 of 6 sites are connected after 0.05 s; missing: partition-id 1, 4"
    ):
        server_app.serve(grid, config, PAUSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deadlin": 3}, "key 'deadlin' is not allowed: did you mean 'deadline'?"),
        ({"deadline": "soon"}, "deadline must be a number, not 'soon'"),
        ({"deadline": -1.0}, "deadline must be at least 0 and at most .*, not -1.0"),
        ({"largest_share": 0.0}, "largest_share must be in .0, 1., not 0.0"),
        ({"sites": 7}, r"sites must be between 0 and 6 \(data.clients\), not 7"),
        ({"output": ""}, "output is missing"),
        ({"configuration": "rounds = "}, "configuration is not TOML"),
        ({"configuration": "rounds = 3"}, "has no algorithm"),
        ({"configuration": "algorithm = 'fedmrr'"}, "did you mean 'fedmr'"),
        ({"configuration": "nowhere.toml"}, "cannot read nowhere.toml"),
    ],
)
def test_a_run_configuration_that_does_not_fit_gets_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = run_config("fedavg", tmp_path / "run") | change
    with pytest.raises(InvalidValue, match=message) as caught:
        server_app.serve(LocalGrid({}, config), config, PAUSE)
    assert "\n" not in str(caught.value)


# --- sites with separate data ---


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper", "feddc"])
def test_sites_train_on_their_own_data(algorithm: str, tmp_path: Path) -> None:
    config = run_config(algorithm, tmp_path / "run")
    config["configuration"] = config["configuration"].replace("local_test = 0.25", "")
    settings = deployment(config)
    task = own_task(settings)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    give_data(grid, task, tmp_path)
    server_app.serve(grid, config, PAUSE)
    expected = Federation(build(algorithm), task, RowsEngine(task), schedule(settings))
    expected.run()
    tensors, _ = read_tensors(tmp_path / "run" / "model.safetensors")
    for name, tensor in task.module(expected.model()).state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-5)
    for record, expected_record in zip(
        json_lines(tmp_path / "run" / "metrics.jsonl"), expected.history, strict=True
    ):
        floats = {
            name: value for name, value in expected_record.items() if isinstance(value, float)
        }
        assert {name: record[name] for name in floats} == pytest.approx(floats, rel=1e-4, abs=1e-6)
        assert record["clients"] == list(expected_record["clients"])
    assert json.loads((tmp_path / "run" / "task.json").read_text())["label_counts"] == []
    assert not (tmp_path / "run" / "split.npz").exists()
    assert (tmp_path / "run" / "report.html").exists()


def test_sites_train_on_noisy_labels_of_the_federations_data(tmp_path: Path) -> None:
    """Each site draws the same label noise as a simulation."""
    config = run_config("ditto", tmp_path / "sites", rounds=2)
    config["configuration"] = config["configuration"].replace(
        "[data]", "[data]\nlabel_noise = 'symmetric([0.2, 0.9])'"
    )
    settings = deployment(config)
    server_app.serve(LocalGrid(nodes(CLIENTS, tmp_path), config), config, PAUSE)
    task = settings.configuration.task(3)
    expected = Federation(build("ditto"), task, RowsEngine(task), schedule(settings))
    expected.run()
    tensors, _ = read_tensors(tmp_path / "sites" / "model.safetensors")
    for name, tensor in task.module(expected.model()).state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-5)
    wrong = json.loads((tmp_path / "sites" / "task.json").read_text())["wrong_labels"]
    assert task.true_labels is not None
    assert wrong == int((task.train.labels != task.true_labels).sum()) > 100


def test_sites_make_labels_of_their_own_training_data_wrong_each_by_its_own_draw(
    tmp_path: Path,
) -> None:
    config = run_config("fedavg", tmp_path / "run")
    text = config["configuration"].replace("[data]", "[data]\nlabel_noise = 'paired([0.2, 0.9])'")
    config["configuration"] = text.replace("local_test = 0.25", "")
    labels = np.arange(300) % 10
    inputs = np.random.default_rng(0).random((300, 1, 8, 8), dtype=np.float32)
    np.savez(
        tmp_path / "all.npz",
        inputs=inputs,
        labels=labels,
        test_inputs=inputs[:50],
        test_labels=labels[:50],
    )
    words = {"data": DataAgreement.of(make_dataset("digits")).words()}
    drawn = []
    for number in (0, 1):
        node_config = {
            "partition-id": number,
            "num-partitions": CLIENTS,
            "memory": str(tmp_path),
            "data": str(tmp_path / "all.npz"),
        }
        task, repeated = (
            Site.of(config, node_config).state.task(words, node_config["partition-id"])
            for _ in range(2)
        )
        assert torch.equal(task.train.labels, repeated.train.labels)
        assert task.train.labels[300:].tolist() == labels[:50].tolist()
        wrong = task.train.labels[:300] != torch.from_numpy(labels)
        assert bool(
            (task.train.labels[:300][wrong] == (torch.from_numpy(labels)[wrong] + 1) % 10).all()
        )
        drawn.append(wrong)
        assert 0.2 <= wrong.float().mean() <= 0.9
    assert drawn[0].float().mean() != drawn[1].float().mean()


def test_a_site_that_joins_later_counts_with_its_own_samples(tmp_path: Path) -> None:
    config = run_config("fedavg", tmp_path / "run", rounds=4, sites=5)
    config["configuration"] = (
        config["configuration"].replace("local_test = 0.25", "").replace("personal_every = 5", "")
    )
    settings = deployment(config)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    give_data(grid, own_task(settings), tmp_path)
    late = site(grid, 4)
    late.online = False
    gathering = Gathering(settings, Mailbox(grid, PAUSE))
    (tmp_path / "run").mkdir()
    task = gathering.task(3)
    engine = gathering.engine(task)
    federation = Federation(build("fedavg"), task, engine, schedule(settings))
    record, _ = federation.step()
    assert [fault["client"] for fault in record["faults"]] == [
        client for client in record["clients"] if client == 4
    ]
    assert task.sizes(torch.tensor([4])).tolist() == [round((40 + 50 + 60 + 70 + 90) / 5)]
    late.online = True
    weights: dict[int, float] = {}

    def receive(round: Any, replies: Any) -> None:
        weights.update(zip(replies.clients.tolist(), replies.weights.tolist(), strict=True))

    federation.algorithm.receive = receive  # type: ignore[method-assign]
    federation.run()
    assert weights == {client: 40 + 10 * client for client in weights}
    assert 4 in weights


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"inputs": np.zeros((5, 3), np.float32)},
            r"differs from the federation: inputs, shape: \(3,\) and \(1, 8, 8\)",
        ),
        ({"labels": np.array([0, 1, 2, 3, 10])}, "labels must be 0 to 9, and 10 is among them"),
    ],
)
def test_data_that_do_not_fit_the_others_are_named(
    arrays: dict[str, np.ndarray[Any, Any]], message: str, tmp_path: Path
) -> None:
    config = run_config("fedavg", tmp_path / "run")
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    digits = make_dataset("digits")
    honest = {"inputs": digits.train.inputs[:5].numpy(), "labels": np.array([0, 1, 2, 3, 4])}
    np.savez(tmp_path / "own.npz", **(honest | arrays))
    site(grid, 2).config["data"] = str(tmp_path / "own.npz")
    with pytest.raises(InvalidValue, match=message):
        server_app.serve(grid, config, PAUSE)


GIVEN = Samples(torch.zeros(4, 3), torch.tensor([0, 1, 1, 0]))


def a_pair() -> Any:
    return np.zeros((4, 3)), [0, 1, 1, 0]


def two_pairs() -> Any:
    return a_pair(), (np.ones((2, 3)), [1, 1])


def two_samples() -> Any:
    return GIVEN, GIVEN[:1]


@pytest.mark.parametrize(("name", "tests"), [("a_pair", 0), ("two_pairs", 2), ("two_samples", 1)])
def test_a_site_names_a_function(name: str, tests: int) -> None:
    train, test = own_data(f"sites.test_server_app:{name}")
    assert train.inputs.shape == (4, 3)
    assert train.labels.tolist() == [0, 1, 1, 0]
    assert (0 if test is None else len(test)) == tests


def test_a_folder_of_arrays_needs_both(tmp_path: Path) -> None:
    np.save(tmp_path / "inputs.npy", np.zeros((4, 3)))
    with pytest.raises(DataError, match="no array 'labels'"):
        own_data(str(tmp_path))


def test_memory_lies_under_flowers_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert NodeConfig.read({"partition-id": 0}).memory == tmp_path / "fedloom"
    config = run_config("scaffold", tmp_path / "run", rounds=1)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    for node in grid.nodes.values():
        del node.config["memory"]
    server_app.serve(grid, config, PAUSE)
    opening = json.loads((tmp_path / "run" / "sites.json").read_text())
    assert list((tmp_path / "fedloom" / opening["federation"]).glob("client-*.v1.safetensors"))
