"""Hooks in a run: a function after each round, saved models, and figures of single clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.algorithm import Cohort
from fedloom.algorithm.records import Message
from fedloom.common.errors import InvalidValue
from fedloom.runs.finished_round import FinishedRound

OPTIONS: dict[str, Any] = {"rounds": 4, "participation": 0.6, "engine": "rows", "quiet": True}


def task(model: str = "mlp(hidden=[4])") -> fl.Task:
    training = {"learning_rate": 0.1, "batch_size": 10}
    return fl.make_task("digits", clients=5, partition="iid", model=model, training=training)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class Measuring(fl.Algorithm):
    """FedAvg whose clients report how far their model has moved."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        end = cohort.fit(inbox["model"]).model
        cohort.metrics["moved"] = (end - inbox["model"]).norm(dim=1)
        return {"model": end}


def test_a_function_gets_the_figures_and_models_of_each_round() -> None:
    of = task()
    sizes = of.partition.sizes
    rounds: list[tuple[int, Any]] = []

    def look(round: FinishedRound) -> None:
        rounds.append((round.number, round.figures))
        assert round.clients == sorted(round.figures["clients"])
        assert round.times["round"] == round.number
        # FedAvg: the global model is the mean of the clients' models, weighted by samples.
        weights = torch.tensor([float(sizes[client]) for client in round.clients])
        models = torch.stack([flat(round.client_model(client)) for client in round.clients])
        mean = (weights @ models) / weights.sum()
        torch.testing.assert_close(flat(round.model), mean, rtol=1e-5, atol=1e-6)
        absent = next(iter({*range(5)} - {*round.clients}))
        with pytest.raises(InvalidValue, match=rf"client {absent} has no model in round"):
            round.client_model(absent)

    result = fl.run("fedavg", of, on_round=look, **OPTIONS)
    assert [number for number, _ in rounds] == [1, 2, 3, 4]
    assert [figures for _, figures in rounds] == result.history
    plain = fl.run("fedavg", of, **OPTIONS)
    assert torch.equal(plain.federation.model(), result.federation.model())


def test_the_server_does_not_change_the_models_of_clients() -> None:
    """Check a method that recombines the clients' models in place."""
    seen: list[Tensor] = []

    def look(round: FinishedRound) -> None:
        seen.append(torch.stack([flat(round.client_model(client)) for client in round.clients]))

    options = {**OPTIONS, "record": ["client_models"]}
    result = fl.run("fedmr", task(), on_round=look, **options)
    assert result.recording is not None
    for number, models in enumerate(seen, start=1):
        recorded = result.recording._models("client_models", number)
        clients = sorted(int(name.partition("/")[0]) for name in recorded)
        assert torch.equal(torch.stack([recorded[f"{k}/model"] for k in clients]), models)


def test_clients_that_send_parts_have_no_model() -> None:
    def look(round: FinishedRound) -> None:
        with pytest.raises(InvalidValue, match="part of the model stays at its clients"):
            round.client_model(0)

    fl.run("fedper", task(), on_round=look, **OPTIONS)


@pytest.mark.parametrize("model", ["mlp(hidden=[4])", "digits_cnn"])
def test_saved_and_recorded_models_are_loaded_by_their_round(tmp_path: Path, model: str) -> None:
    of = task(model)
    seen: dict[int, Tensor] = {}
    third: dict[int, Tensor] = {}
    inputs = of.test.inputs[:9]

    def look(round: FinishedRound) -> None:
        seen[round.number] = round.model(inputs).detach()
        if 3 in round.clients:
            third[round.number] = round.client_model(3)(inputs).detach()

    record = ["client_models(clients=[3], rounds=[1, 2, 3])"]
    options = {**OPTIONS, "directory": tmp_path, "record": record}
    fl.run("fedavg", of, on_round=look, keep_models=2, **options)
    names = [path.name for path in sorted((tmp_path / "models").iterdir())]
    assert names == ["round-0000002.safetensors", "round-0000004.safetensors"]
    for number in (2, 4):
        loaded = fl.load(tmp_path, round=number)
        assert torch.equal(loaded.module(inputs), seen[number])
    with pytest.raises(InvalidValue, match=r"round=3: .* has no such model \(there are: 2, 4\)"):
        fl.load(tmp_path, round=3)
    assert third
    for number in third.keys() & {1, 2, 3}:
        loaded = fl.load(tmp_path, round=number, client=3)
        assert torch.equal(loaded.module(inputs), third[number])
    with pytest.raises(InvalidValue, match=r"record client_models\(clients=\[3\], rounds=\[4\]\)"):
        fl.load(tmp_path, round=4, client=3)


def test_options_that_cannot_have_an_effect_are_refused() -> None:
    with pytest.raises(InvalidValue, match="keep_models saves models in a folder: set directory"):
        fl.run("fedavg", task(), keep_models=2, **OPTIONS)
    record = ["client_models(rounds=[9])"]
    with pytest.raises(InvalidValue, match="round 9 does not exist: the run has 4"):
        fl.run("fedavg", task(), record=record, **OPTIONS)
    record = ["client_models(clients=[7])"]
    with pytest.raises(InvalidValue, match="client must be between 0 and 4, not 7"):
        fl.run("fedavg", task(), record=record, **OPTIONS)


def test_figures_of_a_method_are_kept_by_client(tmp_path: Path) -> None:
    moved: dict[tuple[int, int], float] = {}
    starts = [flat(task().model)]

    def look(round: FinishedRound) -> None:
        for client in round.clients:
            change = flat(round.client_model(client)) - starts[-1]
            moved[round.number, client] = float(change.norm())
        starts.append(flat(round.model))

    options = {**OPTIONS, "directory": tmp_path}
    result = fl.run(Measuring(), task(), on_round=look, **options)
    frame = result.client_metrics()
    kept = {(row.round, row.client): row.moved for row in frame.itertuples()}
    assert kept.keys() == moved.keys()
    assert kept == pytest.approx(moved, rel=1e-4)
    lines = (tmp_path / "client_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]
    for line, record in zip(map(json.loads, lines), result.history, strict=True):
        assert sum(line["moved"]) / len(line["moved"]) == pytest.approx(record["moved"])
    assert not len(fl.run("fedavg", task(), **OPTIONS).client_metrics())
