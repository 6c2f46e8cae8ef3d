"""Replies of sites are untrusted input: they do not decide reported figures, accepted senders or
the end of a run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from every_method import EVERY_METHOD
from fedloom.algorithm.method import components
from fedloom.algorithm.records import INTEGERS, TensorSpec
from fedloom.common.errors import FedloomError
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.flat.layout import Layout
from fedloom.parts.building import build
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Answer, Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.replies import capped
from fedloom.rounds.schedule import Schedule
from fedloom.sites import server_app
from fedloom.sites.agreement import deployment
from fedloom.sites.messages import Mailbox
from flower_support import (
    CLIENTS,
    LocalGrid,
    NormNet,
    Tamper,
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
from secure_sites import peers
from small_task import small_task

ONE, TWO, THREE = selected(1)
SIZE, TRAINABLE = Layout(NormNet()).size, Layout(NormNet()).trainable


def with_figures(**figures: float) -> Tamper:
    """Return a change that adds figures to an answer."""

    def tamper(reply: Message) -> Message:
        words = words_of(reply)
        return with_words(json.dumps({**words, "figures": {**words["figures"], **figures}}))(reply)

    return tamper


# --- figures ---


@pytest.mark.parametrize(
    "name", ["accuracy", "loss", "bytes_up", "round", "peer_bytes", "personal_accuracy", "mood"]
)
def test_a_site_reports_only_what_the_method_has_it_measure(name: str, tmp_path: Path) -> None:
    config = run_config("fedavg", tmp_path / "run", rounds=2)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    site(grid, ONE).tamper = with_figures(**{name: 1.0})
    record, _ = flower(config, grid).step()
    ((client, reason),) = [(fault["client"], fault["reason"]) for fault in record["faults"]]
    assert client == ONE
    assert reason == f"unknown figure {name!r} of a client (allowed: training_loss)"
    assert record.get("accuracy") is None, "round 1 is not evaluated"
    assert record["training_loss"] > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_figures_are_finite(value: float, tmp_path: Path) -> None:
    config = run_config("fedavg", tmp_path / "run", rounds=2)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    site(grid, ONE).tamper = with_figures(training_loss=value)
    record, _ = flower(config, grid).step()
    assert [fault["reason"] for fault in record["faults"]] == [
        "the figure training_loss is not a finite number"
    ]


def test_no_figure_of_clients_takes_the_place_of_the_servers_own() -> None:
    """No figure of clients replaces a figure of the server, even if a method uses the same name."""

    class Boastful(RowsEngine):
        def train(self, *arguments: Any) -> Any:
            for result in super().train(*arguments):
                assert isinstance(result, Answer)
                yield Answer(
                    result.job,
                    result.tensors,
                    {"bytes_up": 1.0, "clients": 7.0, "training_loss": 2.0},
                )

    task = small_task()
    record, _ = Federation(build("fedavg"), task, Boastful(task), Schedule(rounds=1)).step()
    assert record["bytes_up"] > 1
    assert len(record["clients"]) > 0
    assert record["training_loss"] == 2.0


@pytest.mark.parametrize("expression", EVERY_METHOD)
def test_every_method_declares_its_figures_and_the_types_of_its_replies(expression: str) -> None:
    """Every method declares its figures and reply types; real sites may send no others."""
    task = small_task()
    # 15 is too large at this rate
    method = build("pfedme(regularisation=2)" if expression == "pfedme" else expression)
    replies: list[tuple[Answer, dict[str, TensorSpec]]] = []

    class Watching(RowsEngine):
        def train(self, pipeline: Pipeline, round: Round, jobs: Any) -> Any:
            specs = pipeline.expected(round)
            for result in super().train(pipeline, round, jobs):
                assert isinstance(result, Answer), result
                replies.append((result, specs))
                yield result

    federation = Federation(method, task, Watching(task), Schedule(rounds=2, participation=1.0))
    federation.run()
    figures = {name for nested in components(method) for name in nested.client_figures}
    for reply, specs in replies:
        assert reply.metrics.keys() <= figures
        if reply.job.slot is not None:
            assert reply.tensors.keys() == specs.keys()
            for name, tensor in reply.tensors.items():
                assert tensor.dtype == specs[name].dtype, name


# --- types ---


@pytest.mark.parametrize("name", ["variate", INTEGERS])
def test_the_first_reply_does_not_say_what_the_others_must_be(name: str, tmp_path: Path) -> None:
    config = run_config("scaffold", tmp_path / "run", rounds=1)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    wrong = {"variate": np.zeros(TRAINABLE, np.float64), INTEGERS: np.zeros(1, np.int32)}
    for number in selected(1)[:1]:
        site(grid, number).tamper = with_array(name, wrong[name])
    record, _ = flower(config, grid).step()
    assert [fault["client"] for fault in record["faults"]] == [ONE]
    assert f"{name!r} is {wrong[name].dtype}, not " in record["faults"][0]["reason"]


# --- a round without replies ---


def of_one_site(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with one site a round."""
    return config | {
        "configuration": config["configuration"].replace(
            "participation = 0.5", "participation = 0.1666667"
        )
    }


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (with_array("model", np.zeros(3, np.float32)), "has shape [3]"),
        (with_array("model", np.full(SIZE, np.nan, np.float32)), "'model' is not finite"),
        (with_words('{"refused": "training diverged", "diverged": true}'), "training diverged"),
        (with_words("["), "not a JSON object"),
    ],
)
def test_a_round_whose_only_site_is_refused_ends_without_replies(
    tamper: Tamper, reason: str, tmp_path: Path
) -> None:
    config = of_one_site(run_config("fedavg", tmp_path / "run", rounds=5))
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    initial = federation.model()
    for node in grid.nodes.values():
        node.tamper = tamper
    record, _ = federation.step()
    (fault,) = record["faults"]
    assert reason in fault["reason"]
    assert record["bytes_up"] == 0
    assert torch.equal(federation.model(), initial)
    for node in grid.nodes.values():
        node.tamper = None
    federation.run()
    assert not torch.equal(federation.model(), initial)


def test_a_run_ends_with_the_reason_when_every_site_has_failed_and_none_between(
    tmp_path: Path,
) -> None:
    config = run_config("fedavg", tmp_path / "run", rounds=20)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    for node in grid.nodes.values():
        node.tamper = with_words('{"refused": "no more\\nroom"}')
    with pytest.raises(FedloomError, match=r"^round \d+: every site has failed, .*: no more room$"):
        federation.run()
    assert 1 <= federation.finished < 20
    site(grid, 4).tamper = None  # one working site is enough
    federation = flower(config, grid)
    federation.run()
    assert federation.finished == 20


# --- numbers of samples ---


CLAIMS = st.lists(st.integers(1, 1 << 48), min_size=1, max_size=9)


@given(CLAIMS, st.floats(0.01, 0.99))
@settings(max_examples=80, deadline=None)
def test_no_weight_is_more_than_its_share(claims: list[int], share: float) -> None:
    weights = capped(torch.tensor(claims), share).double()
    if share * len(claims) < 1:
        assert weights.tolist() == [1.0] * len(claims)
        return
    assert float(weights.max()) <= share * float(weights.sum()) * (1 + 1e-9)
    assert float(weights.max()) <= 4 * statistics.median_low(claims)
    top = float(weights.max())
    assert all(
        weight == claim or (weight == top and claim >= weight * (1 - 1e-9))
        for weight, claim in zip(weights.tolist(), claims, strict=True)
    )
    if max(claims) <= share * sum(claims) and max(claims) <= 4 * statistics.median_low(claims):
        assert weights.tolist() == claims
    assert capped(torch.tensor(claims), 1.0).tolist() == claims


@given(CLAIMS, st.data())
@settings(max_examples=80, deadline=None)
def test_a_minority_that_lies_together_is_bounded_whatever_the_others_have(
    claims: list[int], data: st.DataObject
) -> None:
    liars = data.draw(st.integers(0, (len(claims) - 1) // 2))
    claims[:liars] = [1 << 48] * liars
    weights = capped(torch.tensor(claims), 0.5).double()
    bound = 4 * liars / (3 * liars + len(claims) // 2 + 1)
    assert float(weights[:liars].sum()) <= bound * float(weights.sum()) * (1 + 1e-9)


def own_data(grid: LocalGrid, folder: Path, sizes: list[int]) -> None:
    """Write separate samples for each site."""
    generator = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        inputs = generator.random((size + 4, 1, 8, 8)).astype(np.float32)
        labels = generator.integers(0, 10, size + 4)
        np.savez(
            folder / f"{number}.npz",
            inputs=inputs[4:], labels=labels[4:], test_inputs=inputs[:4], test_labels=labels[:4],
        )  # fmt: skip
        site(grid, number).config["data"] = str(folder / f"{number}.npz")


def weights_of(
    folder: Path, prepare: Callable[[LocalGrid], None], **options: Any
) -> list[dict[int, float]]:
    """Return each site's weight in each round of a run with all sites."""
    config = run_config("fedavg", folder / "run", rounds=2, **options)
    config["configuration"] = config["configuration"].replace(
        "participation = 0.5", "participation = 1.0"
    )
    config["configuration"] = (
        config["configuration"].replace("local_test = 0.25", "").replace("personal_every = 5", "")
    )
    grid = LocalGrid(nodes(CLIENTS, folder), config)
    own_data(grid, folder, [10, 20, 30, 40, 50, 60])
    prepare(grid)
    settings = deployment(config)
    gathering = server_app.Gathering(settings, Mailbox(grid, 0.01))
    (folder / "run").mkdir()
    task = gathering.task(3)
    federation = Federation(build("fedavg"), task, gathering.engine(task), schedule(settings))
    weighed: list[dict[int, float]] = []

    def receive(_: Any, replies: Any) -> None:
        shares = replies.weights.double() / replies.weights.sum()
        weighed.append(dict(zip(replies.clients.tolist(), shares.tolist(), strict=True)))

    federation.algorithm.receive = receive  # type: ignore[method-assign]
    federation.step()
    for node in grid.nodes.values():
        node.says.pop("late", None)
    federation.step()
    return weighed


@pytest.mark.parametrize(("liars", "share"), [((2,), 160 / 340), ((2, 4), 320 / 450)])
def test_sites_that_claim_a_milliard_of_samples_do_not_own_the_mean(
    liars: tuple[int, ...], share: float, tmp_path: Path
) -> None:
    def lie(grid: LocalGrid) -> None:
        for number in liars:
            site(grid, number).says = {"samples": 10**9 + number}

    for weights in weights_of(tmp_path, lie):
        assert sum(weights[number] for number in liars) == pytest.approx(share)
        honest = {number: weight for number, weight in weights.items() if number not in liars}
        ratio = sum(10 + 10 * number for number in honest) / (1 - share)
        assert honest == pytest.approx({number: (10 + 10 * number) / ratio for number in honest})


def test_the_largest_share_is_the_operators_choice(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, lambda grid: None, largest_share=0.2)
    for shares in weights:
        assert max(shares.values()) == pytest.approx(0.2)
        assert shares[0] < shares[1] < shares[2]
    (tmp_path / "whole").mkdir()
    for shares in weights_of(tmp_path / "whole", lambda grid: None, largest_share=1.0):
        assert shares == pytest.approx({n: (10 + 10 * n) / 210 for n in range(CLIENTS)})


def test_a_site_counts_with_no_more_than_it_had_at_the_start(tmp_path: Path) -> None:
    config = run_config("fedavg", tmp_path / "run", rounds=4)
    config["configuration"] = (
        config["configuration"].replace("local_test = 0.25", "").replace("personal_every = 5", "")
    )
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    own_data(grid, tmp_path, [10, 20, 30, 40, 50, 60])
    settings = deployment(config)
    gathering = server_app.Gathering(settings, Mailbox(grid, 0.01))
    (tmp_path / "run").mkdir()
    gathering.task(3)
    for key, node in list(grid.nodes.items()):  # the sites reconnect and claim more samples
        node.says = {"samples": 60}
        grid.nodes[key + 5000] = grid.nodes.pop(key)
    assert len(gathering.sites.find(range(CLIENTS), 1.0)) == CLIENTS
    assert [gathering.sites.samples(number) for number in range(CLIENTS)] == [
        10,
        20,
        30,
        40,
        50,
        60,
    ]
    assert gathering.opening.samples == [10, 20, 30, 40, 50, 60]


def test_test_samples_weigh_as_many_as_there_were_at_the_start(tmp_path: Path) -> None:
    config = run_config("fedavg", tmp_path / "run", rounds=5)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    local_test = federation.task.local_test
    assert local_test is not None
    engine, pipeline = federation.engine, federation.pipeline
    model = pipeline.model().unsqueeze(0)
    tasks = [Job(number, None, {"model": model}) for number in range(CLIENTS)]
    if federation.task.layout.integers:
        tasks = [
            Job(t.client, None, {**t.inbox, INTEGERS: federation.integers.unsqueeze(0)})
            for t in tasks
        ]
    site(grid, 0).says = {"totals": {"correct": [1.0], "loss": 1.0}}
    site(grid, 1).says = {"samples": 10**9, "totals": {"correct": 10**9, "loss": 1e9}}
    site(grid, 3).says = {"totals": {"correct": 1.0, "loss": float("inf")}}
    site(grid, 4).says = {"totals": {"correct": 10**9, "loss": 10**400}}
    site(grid, 5).says = {"totals": {"correct": 1.0}}
    tallies = {int(t.clients): t for t in engine.evaluate(pipeline, federation._first, tasks)}
    assert tallies.keys() == {1, 2}
    assert int(tallies[1].samples) == int(local_test.sizes[1])
    assert int(tallies[1].totals["correct"]) == int(local_test.sizes[1])
    assert float(tallies[1].totals["loss"]) == pytest.approx(int(local_test.sizes[1]))


def test_what_sites_say_of_themselves_is_in_the_opening_only_within_bounds(tmp_path: Path) -> None:
    weights_of(tmp_path, lambda grid: site(grid, 5).says.update({"tests": 10**9}))
    opening = json.loads((tmp_path / "run" / "sites.json").read_text())
    assert opening["tests"] == [4, 4, 4, 4, 4, 16]


# --- traffic counts ---


@pytest.mark.parametrize("algorithm", ["fedavg", "secure(fedmr, repeats=1)"])
def test_no_bytes_are_counted_for_sites_that_are_not_there(algorithm: str, tmp_path: Path) -> None:
    config = run_config(algorithm, tmp_path / "run", rounds=3)
    grid = peers(tmp_path, config)
    federation = flower(config, grid)
    federation.step()
    (gone,) = set(selected(2)) - {*selected(2)[:2]}
    late = selected(2)[0]
    site(grid, gone).online = False
    site(grid, late).late = True
    federation.engine.sites.deadline = 0.05  # type: ignore[attr-defined]
    record, _ = federation.step()
    assert {fault["client"] for fault in record["faults"]} >= {gone, late}
    bytes_of_a_site = federation.history[0]["bytes_down"] // 3
    assert record["bytes_down"] == 2 * bytes_of_a_site  # the late site also received its message


# --- records ---


def with_record(name: str, record: ConfigRecord | None = None, **entries: bytes) -> Tamper:
    """Return a change that adds a record to an answer, or entries to a record."""

    def tamper(reply: Message) -> Message:
        existing = reply.content.get(name, record)
        reply.content[name] = ConfigRecord({**dict(existing or {}), **entries})
        return reply

    return tamper


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (
            with_record("ballast", bytes=b"0" * 1000),
            "unexpected record 'ballast' in the message",
        ),
        (
            with_record("parcel", bytes=b"0" * 1000),
            "unexpected record 'parcel' in the message",
        ),
        (
            with_record("fedloom", ballast=b"0"),
            "unexpected entry 'ballast' in the message's record 'fedloom'",
        ),
    ],
)
def test_records_that_nobody_asked_for_are_refused(
    tamper: Tamper, reason: str, tmp_path: Path
) -> None:
    config = run_config("fedavg", tmp_path / "run", rounds=5)
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    site(grid, ONE).tamper = tamper
    record, _ = federation.step()
    assert [(fault["client"], fault["reason"]) for fault in record["faults"]] == [(ONE, reason)]


def test_a_reply_that_comes_twice_is_taken_once(tmp_path: Path) -> None:
    class Stutter(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return [reply for reply in super().pull_messages(message_ids) for _ in range(2)]

    config = run_config("fedavg", tmp_path / "run", rounds=2)
    twice, once = (
        flower(config, grid(nodes(CLIENTS, tmp_path), config)) for grid in (Stutter, LocalGrid)
    )
    for federation in (twice, once):
        federation.run()
    assert twice.history == once.history
    assert torch.equal(twice.model(), once.model())
