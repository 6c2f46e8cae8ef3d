"""Flower federations with absent, late, restarted or hostile sites, and with killed or lying
servers.
"""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message, RecordDict

from fedloom.algorithm.records import INTEGERS
from fedloom.common.errors import InvalidValue, RefusedReply
from fedloom.engines.rows import RowsEngine
from fedloom.flat.layout import Layout
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.sites.agreement import deployment
from fedloom.sites.client_app import app
from fedloom.sites.flower_engine import FlowerEngine
from fedloom.sites.messages import NUMBERS, Refusal, decoded, encoded, pack
from flower_support import (
    CLIENTS,
    RUN,
    LocalGrid,
    NormNet,
    Tamper,
    assert_close,
    flower,
    nodes,
    run_config,
    schedule,
    selected,
    site,
    with_array,
    with_words,
    words_of,
)

SIZE = Layout(NormNet()).size
ONE, TWO, THREE = selected(1)


def claiming(dtype: str, shape: tuple[int, ...], data: bytes, kind: str = NUMBERS) -> Tamper:
    """Return a change that declares this type and shape for the model of an answer."""
    return with_array("model", Array(dtype, shape, kind, data))


MODEL = np.zeros(SIZE, np.float32)

HOSTILE: dict[str, tuple[Tamper, str]] = {
    "another name": (with_array("weights", MODEL), "tensors"),
    "a shape": (with_array("model", MODEL[1:]), "shape"),
    "a type": (with_array("model", MODEL.astype(np.float64)), "is float64, not float32"),
    "whole numbers": (with_array("model", MODEL.astype(np.int64)), "is int64, not float32"),
    "not a number": (with_array("model", MODEL + np.nan), "not finite"),
    "far too large": (with_array("model", np.zeros(50 * SIZE, np.float32)), "shape"),
    "more bytes than it says": (claiming("float32", (SIZE,), bytes(4 * SIZE + 5000)), "bytes, "
                                                                                      "but its "
                                                                                      "shape "
                                                                                      "needs"),
    "fewer bytes": (claiming("float32", (SIZE,), bytes(4 * SIZE - 8)), "but its shape needs"),
    "a petabyte": (claiming("float32", (1 << 30, 1 << 18), bytes(4 * SIZE)), "shape"),
    "objects": (claiming("object", (SIZE,), pickle.dumps([{"a": 1}])), "type 'object'"),
    "NumPy's format": (claiming("float32", (SIZE,), bytes(4 * SIZE), "numpy.ndarray"), "is of "
                                                                                       "type"),
    "another protocol": (with_words("{}", protocol=99), "protocol 99"),
    "no words": (with_words("never"), "not a JSON object"),
    "another round": (with_words(f'{{"site": {ONE}, "round": 7, "memory": 0}}'), "round must be"),
    "another site": (with_words(f'{{"site": {TWO}, "round": 1, "memory": 0}}'), "another request"),
    "a memory nobody has": (with_words(f'{{"site": {ONE}, "round": 1, "memory": -1}}'), "memory must be"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_reply_is_refused_and_the_round_ends_with_the_others(
    kind: str, tmp_path: Path
) -> None:
    tamper, reason = HOSTILE[kind]
    config = run_config("fedavg", tmp_path / "run", rounds=1)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    site(grid, ONE).tamper = tamper
    federation = flower(config, grid)
    record, _ = federation.step()
    assert tuple(record["clients"]) == selected(1)
    (fault,) = record["faults"]
    assert fault["client"] == ONE
    assert reason in fault["reason"]
    assert "\n" not in fault["reason"]
    assert record["bytes_up"] == 2 * (4 * SIZE + 8)  # includes the integer buffers
    assert bool(torch.isfinite(federation.model()).all())


@pytest.mark.parametrize("algorithm", ["scaffold", "fedmr"])
def test_absent_and_late_sites_drop_out_as_in_a_simulation(algorithm: str, tmp_path: Path) -> None:
    config = run_config(algorithm, tmp_path / "run", rounds=3)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    federation.engine.sites.deadline = 0.1  # type: ignore[attr-defined]
    expected = simulated(config, {1: {ONE, TWO}})
    site(grid, ONE).online = False
    site(grid, TWO).late = True  # it trains and stores this
    record, _ = federation.step()
    assert [(f["client"], f["reason"]) for f in record["faults"]] == [
        (ONE, "the site is not connected"),
        (TWO, "no reply within 0.1 s"),
    ]
    site(grid, ONE).online, site(grid, TWO).late = True, False
    federation.engine.sites.deadline = 60.0  # type: ignore[attr-defined]
    federation.run()
    expected.run()
    for actual_record, expected_record in zip(
        federation.history[:1], expected.history[:1], strict=True
    ):
        # the late site received the message, the absent site did not
        sent = len(actual_record["clients"]) - 1
        assert (
            actual_record["bytes_down"] * len(actual_record["clients"])
            == expected_record["bytes_down"] * sent
        )
        actual_record["bytes_down"] = expected_record["bytes_down"]
        actual_record["faults"], expected_record["faults"] = [], []
    assert_close(federation, expected)


class Dropping(RowsEngine):
    """A simulation with some clients absent in some rounds."""

    absent: dict[int, set[int]]

    def train(self, algorithm: Any, round: Any, jobs: Any) -> Any:
        gone = self.absent.get(round.number, set())
        return super().train(algorithm, round, [job for job in jobs if job.client not in gone])


def simulated(config: dict[str, Any], absent: dict[int, set[int]]) -> Federation:
    settings = deployment(config)
    task = settings.configuration.task(3)
    engine = Dropping(task)
    engine.absent = absent
    return Federation(build(settings.algorithm), task, engine, schedule(settings))


def test_a_node_that_registers_anew_is_found_again(tmp_path: Path) -> None:
    config = run_config("scaffold", tmp_path / "run", rounds=3)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    federation.step()
    for number, node in list(grid.nodes.items()):  # every SuperNode restarts with a new id
        del grid.nodes[number]
        grid.nodes[number + 50_000] = replace(node)
    federation.run()
    assert not any(record["faults"] for record in federation.history)
    expected = simulated(config, {})
    expected.run()
    assert_close(federation, expected)


def test_a_site_that_lost_its_memory_says_so_once_and_begins_anew(tmp_path: Path) -> None:
    config = run_config("scaffold", tmp_path / "run", rounds=6)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    federation.step()
    for number in selected(1):
        shutil.rmtree(tmp_path / f"site-{number}")
    federation.run()
    faults = [fault for record in federation.history for fault in record["faults"]]
    assert faults
    assert all("its memory of round 1 is lost" in fault["reason"] for fault in faults)
    assert len({fault["client"] for fault in faults}) == len(faults) <= 3
    assert {fault["client"] for fault in faults} <= set(selected(1))


def test_two_sites_with_one_number_are_refused(tmp_path: Path) -> None:
    config = run_config("fedavg", tmp_path / "run")
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    grid.nodes[7] = replace(site(grid, 2))
    with pytest.raises(
        InvalidValue,
        match=r"two sites have partition-id 2 \(nodes \d+ and \d+\): give each a different one",
    ):
        flower(config, grid)


def test_a_second_site_with_a_number_that_comes_later_is_left_alone(tmp_path: Path) -> None:
    config = run_config("fedavg", tmp_path / "run", rounds=2)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    intruder = replace(site(grid, 2), trained=[])
    grid.nodes[7] = intruder
    federation.run()
    assert not any(record["faults"] for record in federation.history)
    assert intruder.trained == []


def test_a_newcomer_takes_a_number_only_when_its_holder_is_gone(tmp_path: Path) -> None:
    """A newcomer takes a number only after its holder disconnects.

    A holder may be silent for any time, for example during training.
    """
    config = run_config("fedavg", tmp_path / "run", rounds=4)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    federation.engine.sites.deadline = 0.05  # type: ignore[attr-defined]
    holder = site(grid, ONE)
    newcomer = replace(holder, trained=[])
    holder.silent = True
    grid.nodes[7] = newcomer
    record, _ = federation.step()
    assert [fault["client"] for fault in record["faults"]] == [ONE]
    assert newcomer.trained == []
    holder.online = False
    while federation.finished < 4:
        record, _ = federation.step()
        assert record["faults"] == []
    assert newcomer.trained


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition-id": 6}, "partition-id 6 is not one of 0 to 5"),
        ({"partition-id": "first"}, "partition-id must be a whole number, not 'first'"),
        ({"num-partitions": 7}, "num-partitions is 7, but data.clients of the federation is 6"),
        ({"data": "nowhere.npz"}, "nowhere.npz: cannot be read"),
    ],
)
def test_a_site_that_does_not_fit_ends_the_run_before_it_begins(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = run_config("fedavg", tmp_path / "run")
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    site(grid, 5).config |= change
    with pytest.raises(InvalidValue, match=message):
        flower(config, grid)


def test_other_versions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config("fedavg", tmp_path / "run")
    monkeypatch.setattr("fedloom.sites.site.fedloom.__version__", "9.9")
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    monkeypatch.setattr("flower_support.VERSION", "0.1")
    with pytest.raises(InvalidValue, match=r"site \d: fedloom is '9.9' there, but '0.1' here"):
        flower(config, grid)


# --- a site receives false messages ---


def answer_of_site_0(
    kind: str, words: dict[str, Any], tensors: dict[str, torch.Tensor], tmp_path: Path
) -> dict[str, Any]:
    """Return the answer of site 0."""
    config = run_config("fedavg", tmp_path / "run")
    LocalGrid({}, config)  # sets the identity of Flower
    message = Message(
        pack(words, {name: encoded(tensor) for name, tensor in tensors.items()}),
        5,
        kind,
        group_id="1",
    )
    context = Context(RUN, 5, {"partition-id": 0, "memory": str(tmp_path)}, RecordDict(), config)
    try:
        return words_of(app(message, context))
    except Refusal as refusal:
        return refusal.words


ROUND = {
    "number": 1, "rounds": 5, "seed": 3, "clients": 6, "participants": 3, "learning_rate": 0.05,
    "initial_learning_rate": 0.05, "rate_change": 1.0, "selected": [0], "poisson": False,
}  # fmt: skip

ORDER: dict[str, Any] = {
    "site": 0, "client": 0, "round": ROUND, "federation": "0123456789abcdef", "memory": 0, "keep": [],
    "expected": {"model": [SIZE], INTEGERS: [1]},
}  # fmt: skip

INBOX = {"model": torch.zeros(1, SIZE), INTEGERS: torch.zeros(1, 1, dtype=torch.int64)}


def test_a_site_does_what_it_is_asked(tmp_path: Path) -> None:
    words = answer_of_site_0("train", ORDER, INBOX, tmp_path)
    assert words.pop("figures").keys() == {"training_loss"}
    assert words == {"site": 0, "round": 1, "memory": 0}


@pytest.mark.parametrize(
    ("words", "tensors", "reason"),
    [
        ({"federation": "../../../etc"}, {}, "is not the name of a federation"),
        ({"site": 4}, {}, "this is site 0, not 4"),
        ({"client": 6}, {}, "client must be a whole number between 0 and 5"),
        ({"memory": -1}, {}, "memory must be"),
        ({"round": {**ROUND, "learning_rate": "fast"}}, {}, "no valid round"),
        ({"round": 1}, {}, "no valid round"),
        ({"expected": 3}, {}, "no valid shapes"),
        ({}, {"model": torch.full((1, SIZE), torch.inf)}, "not finite"),
        ({}, {"model": torch.zeros(1, SIZE + 1)}, "not a model of this task"),
        ({}, {"model": torch.zeros(2, SIZE)}, "expected one row"),
        ({}, {INTEGERS: torch.zeros(1, 3, dtype=torch.int64)}, "integer buffers of another model"),
    ],
)
def test_a_site_checks_what_it_gets(
    words: dict[str, Any], tensors: dict[str, torch.Tensor], reason: str, tmp_path: Path
) -> None:
    answer = answer_of_site_0("train", ORDER | words, INBOX | tensors, tmp_path)
    assert reason in answer["refused"]
    assert not list(tmp_path.rglob("*.safetensors"))


def test_arrays_of_any_shape_survive_the_way() -> None:
    for tensor in (
        torch.randn(3, 4),
        torch.tensor(1.5),
        torch.zeros(0),
        torch.randn(4, 3).T,
        torch.tensor([True]),
    ):
        assert torch.equal(decoded("a", encoded(tensor)), tensor)
    with pytest.raises(RefusedReply, match="complex64"):
        decoded("a", Array(np.zeros(2, np.complex64)))


def test_a_site_trains_from_the_memory_that_the_server_took(tmp_path: Path) -> None:
    """A site trains from the memory that the server accepted.

    Equal messages get equal answers, and sites store only memory that the server may still need.
    """
    config = run_config("scaffold", tmp_path / "run", rounds=5)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    federation.run()
    assert isinstance(federation.engine, FlowerEngine)
    versions = federation.engine.memory()["versions"].tolist()
    for number in range(CLIENTS):
        stored = sorted(
            int(path.stem.rpartition("v")[2])
            for path in (tmp_path / f"site-{number}").rglob("*.safetensors")
        )
        assert versions[number] in [*stored, 0]
        # Without checkpoints: the newest memory and its predecessor.
        assert len(stored) <= 2
    message = next(m for m in reversed(grid.sent) if m.metadata.message_type == "train")
    node = grid.nodes[message.metadata.dst_node_id]
    answer, repeated = (
        node.answer(message, config, message.metadata.dst_node_id) for _ in range(2)
    )
    assert answer.content.array_records == repeated.content.array_records
    assert json.loads(str(answer.content.config_records["fedloom"]["words"]))["round"] == 5


def test_the_engine_remembers_versions_through_a_rollback(tmp_path: Path) -> None:
    config = run_config("scaffold", tmp_path / "run", rounds=3)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    federation.step()
    original = federation.engine.memory()["versions"].clone()
    federation.algorithm.receive = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        federation.step()
    assert torch.equal(federation.engine.memory()["versions"], original)
    del federation.algorithm.receive
    federation.run()
    expected = simulated(config, {})
    expected.run()
    assert_close(federation, expected)
