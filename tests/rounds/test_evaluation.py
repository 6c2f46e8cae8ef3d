"""Compare scores of the global model and of every client with plain loops; evaluation changes no
state.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fedloom as fl
from every_method import EVERY_METHOD, WRAPPERS
from fedloom.algorithm import Algorithm
from fedloom.algorithm.records import Message, Replies
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.data.dataset import Samples
from fedloom.data.partition import Partition
from fedloom.engines.rows import RowsEngine
from fedloom.local.cohort import Cohort
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.objectives.metrics import build_metrics
from fedloom.parts.building import build
from fedloom.report.page import render
from fedloom.rounds.engine import Job
from fedloom.rounds.evaluation import COST_SHARE, TRAINING_PASSES, cadence, newcomers_last
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.rounds.scoring import Evaluator, Tally
from fedloom.task import Task
from json_lines import json_lines
from small_task import CLASSES, TEST_SIZES, KeepsClientMemory, SmallNet, small_task


def federation(
    algorithm: Algorithm, task: Task | None = None, directory: Path | None = None, **options: object
) -> Federation:
    chosen = small_task() if task is None else task
    settings = {
        "rounds": 4,
        "participation": 1.0,
        "seed": 1,
        "evaluate_every": 1,
        "personal_every": 1,
    } | options
    return Federation(algorithm, chosen, RowsEngine(chosen), Schedule(**settings), directory)  # type: ignore[arg-type]


def naive(model: nn.Module, samples: Samples) -> tuple[int, float]:
    """Return correct predictions and summed cross entropy, sample by sample."""
    module = copy.deepcopy(model).eval().requires_grad_(False)
    hits, loss = 0, 0.0
    for x, y in zip(samples.inputs, samples.labels, strict=True):
        logits = module(x.unsqueeze(0))[0]
        hits += int(logits.argmax() == y)
        loss += float(-logits.log_softmax(0)[y])
    return hits, loss


def own_test(task: Task, client: int) -> Samples:
    assert task.local_test is not None
    return task.train[torch.from_numpy(task.local_test[client])]


def summary(hits: list[int], sizes: list[int]) -> dict[str, float]:
    """Compute the three accuracy figures in plain loops."""
    accuracies = [h / n for h, n in zip(hits, sizes, strict=True)]
    mean = sum(accuracies) / len(accuracies)
    worst = sorted(accuracies)[: math.ceil(len(accuracies) / 10)]
    return {
        "accuracy": sum(hits) / sum(sizes),
        "accuracy_std": math.sqrt(sum((a - mean) ** 2 for a in accuracies) / len(accuracies)),
        "accuracy_worst": sum(worst) / len(worst),
    }


def random_row(task: Task, seed: int) -> Tensor:
    row = torch.randn(task.layout.size, generator=torch.Generator().manual_seed(seed))
    row[task.layout.trainable :].abs_()  # running variances
    return row


@pytest.mark.parametrize("batch_size", [1, 7, 500])
def test_scores_equal_plain_loops(batch_size: int) -> None:
    task = small_task()
    evaluator = Evaluator(task.model, task.layout, task.dataset)
    evaluator.batch_size = batch_size
    row = random_row(task, 2)
    score = evaluator.score(row, task.test)
    hits, loss = naive(task.module(row), task.test)
    assert score["accuracy"] == hits / 20
    assert score["loss"] == pytest.approx(loss / 20, rel=1e-5)
    clients = [0, 1, 2, 4, 5]
    tally = evaluator.tally(row, task.train, task.local_test, clients)  # type: ignore[arg-type]
    for index, client in enumerate(clients):
        hits, loss = naive(task.module(row), own_test(task, client))
        assert int(tally.totals["correct"][index]) == hits
        assert float(tally.totals["loss"][index]) == pytest.approx(loss, rel=1e-5)
    assert tally.samples.tolist() == [n for n in TEST_SIZES if n]


@pytest.mark.parametrize("batch_size", [3, 7, 500])
def test_shared_batches_give_the_same_figures_as_client_by_client(batch_size: int) -> None:
    task = small_task()
    local_test = task.local_test
    assert local_test is not None
    task = replace(
        task, dataset=replace(task.dataset, metrics=build_metrics([own_recall], task.objective))
    )
    evaluator = Evaluator(task.model, task.layout, task.dataset)
    evaluator.batch_size = batch_size
    clients, row = [0, 1, 2, 4, 5], random_row(task, 1)
    batched = evaluator.tally(row, task.train, local_test, clients)
    separate = Tally.joined(
        [evaluator.tally(row, task.train, local_test, [client]) for client in reversed(clients)]
    )
    assert batched.clients.tolist() == separate.clients.tolist() == clients
    assert batched.samples.tolist() == separate.samples.tolist()
    assert batched.totals.keys() == separate.totals.keys()
    assert len(separate.totals) == 4
    for name, total in separate.totals.items():
        torch.testing.assert_close(batched.totals[name], total)


def own_recall(outputs: Tensor, targets: Tensor) -> float:
    """Return a client's recall of the class of its first sample."""
    chosen = targets == targets[0]
    return float((outputs.argmax(1)[chosen] == targets[0]).double().mean())


@settings(deadline=None, max_examples=50)
@given(
    counts=st.lists(
        st.integers(1, 30).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
        min_size=1,
        max_size=25,
    )
)
def test_figures_over_clients_equal_plain_loops(counts: list[tuple[int, int]]) -> None:
    hits, sizes = [h for h, _ in counts], [n for _, n in counts]
    totals = {"correct": torch.tensor(hits).double(), "loss": torch.ones(len(hits)).double()}
    tally = Tally(torch.arange(len(hits)), torch.tensor(sizes), totals)
    figures = tally.figures("x", CLASSIFICATION)
    for name, expected in summary(hits, sizes).items():
        assert figures[f"x_{name}"] == pytest.approx(expected, abs=1e-12)
    assert figures["x_loss"] == pytest.approx(len(hits) / sum(sizes))


def test_tallies_join_in_the_order_of_clients() -> None:
    tallies = [
        Tally(
            torch.tensor([c]),
            torch.tensor([9]),
            {"correct": torch.tensor([c + 1]), "loss": torch.tensor([c / 2])},
        )
        for c in (5, 0, 3)
    ]
    joined = Tally.joined(tallies)
    assert joined.clients.tolist() == [0, 3, 5]
    assert joined.totals["correct"].tolist() == [1, 4, 6]
    assert joined.totals["loss"].tolist() == [0.0, 1.5, 2.5]


class Recorded(KeepsClientMemory):
    """Stores every client's upload, round by round."""

    def receive(self, round: Round, replies: Replies) -> None:
        self.uploads = {
            **getattr(self, "uploads", {}),
            round.number: dict(zip(replies.clients.tolist(), replies["model"], strict=True)),
        }
        super().receive(round, replies)


def test_personal_models_equal_the_uploads_of_the_next_round() -> None:
    """Personal models equal the uploads of the next round, and their scores equal plain loops.

    `Recorded.personalise` trains like a client. After round t it gives the exact uploads of the
    next round, with equal dropout and batch order. The clients' test data score them.
    """
    task = small_task()
    run = federation(Recorded(), task)
    run.run()
    assert isinstance(run.algorithm, Recorded)
    tested = [client for client, size in enumerate(TEST_SIZES) if size]
    for number in (1, 2, 3):
        hits = [
            naive(task.module(run.algorithm.uploads[number + 1][c]), own_test(task, c))[0]
            for c in tested
        ]
        record, table = run.history[number - 1], run.client_history[number - 1]
        for name, expected in summary(hits, [n for n in TEST_SIZES if n]).items():
            assert record[f"personal_{name}"] == pytest.approx(expected)
        assert table["personal"]["clients"] == tested
        assert table["personal"]["samples"] == [n for n in TEST_SIZES if n]
        assert table["personal"]["accuracy"] == pytest.approx(
            [h / TEST_SIZES[c] for h, c in zip(hits, tested, strict=True)]
        )
    hits = [naive(task.module(run.model()), own_test(task, c))[0] for c in tested]
    assert run.history[-1]["client_accuracy"] == pytest.approx(sum(hits) / sum(TEST_SIZES))


def test_evaluation_changes_no_state() -> None:
    """Evaluation changes no models, statistics, integer buffers, memory, figures or torch random
    numbers.
    """
    runs = []
    for every in (0, 1):
        torch.manual_seed(9)
        run = federation(KeepsClientMemory(), personal_every=every, participation=0.5)
        run.run()
        runs.append((run, torch.rand(3)))
    (blind, drawn), (looking, drawn_too) = runs
    assert torch.equal(blind.model(), looking.model())
    assert torch.equal(blind.integers, looking.integers)
    assert torch.equal(drawn, drawn_too)
    memory, other_memory = (run.engine.store for run in (blind, looking))  # type: ignore[attr-defined]
    assert list(memory) == list(other_memory)
    for client in memory:
        assert all(
            torch.equal(tensor, other_memory.read(client)[name])
            for name, tensor in memory.read(client).items()
        )
    assert blind.history == [
        {name: v for name, v in record.items() if not name.startswith(("client_", "personal_"))}
        for record in looking.history
    ]
    assert blind.client_history == []


class Careless(FedAvg):
    """Changes the inbox in place; the inbox may be a tensor of the server."""

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        for batch in cohort.batches():
            cohort.gradient(inbox["model"], batch)
        inbox["model"].mul_(2)
        return inbox["model"]


def test_a_method_that_edits_its_inbox_harms_nobody() -> None:
    runs = [federation(Careless(), personal_every=every) for every in (0, 1)]
    for run in runs:
        run.run()
    assert torch.equal(runs[0].model(), runs[1].model())


def test_personal_and_client_figures_agree_for_global_methods() -> None:
    run = federation(FedAvg())
    run.run()
    for record in run.history:
        for figure in ("accuracy", "accuracy_std", "accuracy_worst", "loss"):
            assert record[f"personal_{figure}"] == record[f"client_{figure}"]


class Plain(FedAvg):
    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        return inbox["model"].clone()


def test_one_pass_over_all_clients_equals_client_by_client() -> None:
    batched, one_by_one = federation(FedAvg()), federation(Plain())
    batched.run()
    one_by_one.run()
    assert [t["personal"] for t in batched.client_history] == [
        t["personal"] for t in one_by_one.client_history
    ]


GLOBAL = {
    "afl", "fedcross", "fedkdmr", "fedlc(fedavg)", "fedntd(fedmr)", "feddecorr(scaffold)", "power_of_choice(fedavg)",
    "qfedavg(q=0.1)",
    "clusamp", "clustered(fedmr)", "clustered(silobn(buffers=average))", "fedadam", "fedasam", "fedavg", "fedavgm", "feddc",
    "feddc_code", "scaffold_feddc",
    "fedasync(fedavg)", "fedbuff(fedavg, k=2)", "fedmr_async(k=2)",
    "feddyn", "fedexp", WRAPPERS["fedgen"], "fedmr", "fedmr(local=moon)", "fedmut",
    "fednova", "fedprox", "fedsam", "fedyogi", "indep",
    "lowrank(fedavg, rank=1)", "moon", "norm_bound(fedavg, radius=0.5)", "sign_flip(fedavg)",
    "quantised(fedavg, bits=4, down=8)", "robust(fedavg)", "scaffold",
    "secure(fedmr)", "silobn(buffers=average)",
    "ca2fl(k=2)", "cluster_fedvarp(clusters=2)", "ema(fedavg)", "fedacg", "fedadagrad", "fedcm", "fedgloss", "fedgmt",
    "fedinit", "fedlaavg", "fedlesam", "fedmuon", "fedsmoo", "fedspeed", "fedstale", "fedswa", "fedvarp",
    "fisher_merge(fedmr)", "last(fedprox, n=2)", "longest_idle(fedprox)", "mifa", "mofedsam",
    "partial_work(fednova, stragglers=0.6)",
    "sparse(fedavg, share=0.3)", "stages(fedavg:1, fedmr)", "stages(ditto:1, fedmr)", "umf(feddc)",
}  # fmt: skip
"""Methods whose clients all use the global model."""

GLOBAL_WITHOUT_NORM = {"silobn"}
"""Further ones, for models without batch norm."""

NESTED = [
    "clustered(ditto, by=size)", "clustered(silobn(buffers=average))", "fedmr(local=moon)", "silobn(buffers=average)",
    "silobn(buffers=average, eval_point=after_train)", "stages(ditto:1, fedmr)", "stages(fedavg:1, ditto)",
    "secure(stages(fedavg(weighted=false):1, ala(fedmr)))",
]  # fmt: skip


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("method", sorted({*EVERY_METHOD, *NESTED, *GLOBAL}))
def test_clients_are_scored_separately_only_if_their_models_differ(method: str, norm: bool) -> None:
    evaluated: list[Job] = []

    class RecordingEngine(RowsEngine):
        def evaluate(self, *arguments: Any) -> Iterator[Tally]:
            evaluated.extend(arguments[2])
            return super().evaluate(*arguments)

    task = replace(small_task(norm=norm), training=Training(learning_rate=0.05, batch_size=4))
    if not norm and "fedbn" in method:
        pytest.skip("needs batch norm")
    algorithm, engine = build(method), RecordingEngine(task)
    run = Federation(
        algorithm,
        task,
        engine,
        Schedule(rounds=2, participation=1.0, evaluate_every=1, personal_every=1),
    )
    run.run()
    assert not any(record["faults"] for record in run.history)
    pipeline = run.pipeline
    expected = method not in (GLOBAL if norm else {*GLOBAL, *GLOBAL_WITHOUT_NORM})
    assert bool(evaluated) == pipeline.personal == expected
    following = run._first.at(3)
    evaluated.clear()
    clients = run.evaluation.clients
    scored = run.evaluation._tally(pipeline, following, run.integers, None, clients)
    figures = scored.figures("personal", task.objective)
    recorded = {name: run.history[-1][name] for name in figures}
    assert figures == pytest.approx(recorded, rel=1e-4)
    models = [engine.personalised(pipeline, following, [job])[0][1] for job in evaluated]
    assert len(models) == len(clients) == 5
    differs = any(not torch.equal(model, run.model()) for model in models)
    # clients of partialfed choose; without batch norm they still prefer the global layers here
    assert differs == (pipeline.personal and (norm or method != "partialfed"))


@pytest.mark.parametrize("method", sorted({*EVERY_METHOD, *NESTED}))
def test_a_notice_names_what_the_global_model_has_as_drawn(method: str) -> None:
    task = replace(small_task(), training=Training(learning_rate=0.05, batch_size=4))
    run = federation(build(method), task, rounds=2)
    run.run()
    layout, initial = run.task.layout, run.task.initial
    same = {
        tensor.name
        for tensor in layout.slices
        if torch.equal(run.model()[tensor.slice], initial[tensor.slice])
    }
    texts = [text for text in run.notices if "never changes" in text]
    names = texts[0].split(" never changes ")[1].split(": clients")[0].split(", ") if texts else []
    statistics = "the statistics of "
    layers = {name for name in names if not name.startswith(statistics)}
    others = {name.removeprefix(statistics) for name in names if name.startswith(statistics)}
    assert layers == {name.removesuffix(".weight") for name in same if name.endswith(".weight")}
    buffers = {name.removesuffix(".running_var") for name in same if name.endswith("_var")}
    assert others == buffers - layers


class OneHot(FedAvg):
    """Sends each client a model that always predicts one class, the client's number modulo 4."""

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        rows = torch.zeros(len(clients), self.plan.layout.size)
        bias = next(entry for entry in self.plan.layout.slices if entry.name == "out.bias")
        for k, client in enumerate(clients):
            rows[k, bias.start + client % CLASSES] = 1
        return {"model": rows}


def test_every_client_gets_its_own_row() -> None:
    task = small_task()
    run = federation(OneHot(), task, rounds=1)
    run.run()
    table = run.client_history[0]["personal"]
    for client, accuracy in zip(table["clients"], table["accuracy"], strict=True):
        assert accuracy == pytest.approx(
            float((own_test(task, client).labels == client % CLASSES).double().mean())
        )


def test_new_clients_never_train_and_are_scored_with_the_global_model(tmp_path: Path) -> None:
    task = small_task()
    run = federation(KeepsClientMemory(), task, tmp_path, new_clients=0.5, participation=0.67)
    run.run()
    newcomers = sorted(run.numbers[3:])
    trained = {client for record in run.history for client in record["clients"]}
    assert len(newcomers) == 3
    assert trained == set(range(6)) - set(newcomers)
    assert all(len(record["clients"]) == 2 for record in run.history)
    tested = [client for client in newcomers if TEST_SIZES[client]]
    lines = json_lines(tmp_path / "clients.jsonl")
    assert lines == run.client_history
    assert lines[-1]["new_client"]["clients"] == tested
    assert lines[-1]["new_client"]["samples"] == [TEST_SIZES[client] for client in tested]
    assert set(lines[-1]["personal"]["clients"]) == {
        c for c in range(6) if c not in newcomers and TEST_SIZES[c]
    }
    assert set(run.engine.store) <= {0, 1, 2}  # type: ignore[attr-defined]


def test_new_clients_use_what_personalise_makes_of_the_global_model() -> None:
    task = small_task()
    run = federation(Plain(), task, new_clients=0.5)
    run.run()
    newcomers = [client for client in run.numbers[3:] if TEST_SIZES[client]]
    hits = [naive(task.module(run.model()), own_test(task, client))[0] for client in newcomers]
    assert run.history[-1]["new_client_accuracy"] == pytest.approx(
        sum(hits) / sum(TEST_SIZES[c] for c in newcomers)
    )


def test_moving_new_clients_last_keeps_everybodys_data() -> None:
    task = small_task()
    moved, numbers = newcomers_last(task, 2, seed=4)
    assert sorted(numbers) == list(range(6))
    assert list(numbers[:4]) == sorted(numbers[:4])
    for index, client in enumerate(numbers):
        assert np.array_equal(moved.partition[index], task.partition[client])
        assert np.array_equal(moved.local_test[index], task.local_test[client])  # type: ignore[index]
    draws = {tuple(newcomers_last(task, 2, seed)[1][4:]) for seed in range(40)}
    assert len(draws) > 8  # of the 15 pairs
    with pytest.raises(InvalidValue, match="new_clients leaves none of the 6 clients to train"):
        newcomers_last(task, 6, seed=0)


def test_the_evaluated_subset_is_fixed_and_drawn_by_the_seed() -> None:
    subsets = set()
    for seed in range(12):
        run = federation(FedAvg(), seed=seed, personal_clients=2, rounds=2)
        run.run()
        clients, later_clients = (table["personal"]["clients"] for table in run.client_history)
        assert clients == later_clients
        assert len(clients) == 2
        subsets.add(tuple(clients))
    assert len(subsets) > 3
    assert not any(3 in subset for subset in subsets)  # client 3 has no test data


def test_personal_figures_need_test_data_of_the_clients() -> None:
    run = federation(KeepsClientMemory(), small_task(own_test=False), personal_every=None)
    run.run()
    assert not any(
        name.startswith(("client_", "personal_")) for record in run.history for name in record
    )
    for options in ({"personal_every": 3}, {"personal_every": None, "new_clients": 0.5}):
        with pytest.raises(InvalidValue) as error:
            federation(KeepsClientMemory(), small_task(own_test=False), **options)
        assert "needs the clients' own test data: set local_test of the task" in str(error.value)
        assert "\n" not in str(error.value)


def test_evaluations_run_in_the_rounds_due() -> None:
    run = federation(FedAvg(), rounds=7, evaluate_every=3, personal_every=2)
    run.run()
    assert [r["round"] for r in run.history if "accuracy" in r] == [3, 6, 7]
    assert [r["round"] for r in run.history if "personal_accuracy" in r] == [2, 4, 6, 7]
    assert [r["round"] for r in run.history if "client_accuracy" in r] == [2, 3, 4, 6, 7]
    assert [line["round"] for line in run.client_history] == [2, 4, 6, 7]
    never = federation(FedAvg(), rounds=2, personal_every=0)
    never.run()
    assert not any(
        name.startswith(("client_", "personal_")) for record in never.history for name in record
    )


@settings(deadline=None, max_examples=60)
@given(
    participation=st.floats(0.1, 1),
    training=st.builds(
        Training,
        epochs=st.integers(1, 5),
        steps=st.one_of(st.none(), st.integers(1, 20)),
        batch_size=st.one_of(st.none(), st.integers(1, 30)),
    ),
    evaluate_every=st.one_of(st.none(), st.integers(1, 9)),
    personal_every=st.one_of(st.none(), st.integers(0, 9)),
)
def test_the_chosen_cadence_costs_at_most_its_share_of_the_time(
    participation: float, training: Training, evaluate_every: int | None, personal_every: int | None
) -> None:
    task = replace(small_task(), training=training)
    schedule = Schedule(
        participation=participation, evaluate_every=evaluate_every, personal_every=personal_every
    )
    every, personal = cadence(task, schedule, trainers=6, evaluated=5)
    if evaluate_every is not None:
        assert every == evaluate_every
    if personal_every is not None:
        assert personal == personal_every
    sizes = task.partition.sizes
    batches = training.steps if training.steps is not None else 0
    batch = min(training.batch_size or math.inf, float(sizes.mean()))
    local = TRAINING_PASSES * (
        batches * batch if training.steps is not None else training.epochs * float(sizes.mean())
    )
    round_cost = max(1, int(participation * 6 + 1e-9)) * local
    local_samples = 5 * float(np.mean(TEST_SIZES)) if personal else 0.0
    overall = (len(task.test) + local_samples) / (every * round_cost)
    clients = (5 * local + 2 * local_samples) / (personal * round_cost) if personal else 0.0
    if evaluate_every is None and personal_every is None:
        assert overall + clients <= COST_SHARE + 1e-9
        assert overall <= COST_SHARE / 2 + 1e-9
        assert personal == 1 or clients * personal / (personal - 1) > COST_SHARE - overall - 1e-9
    elif evaluate_every is None:
        assert overall <= COST_SHARE + 1e-9
    if evaluate_every is None and every > 1:
        assert overall * every / (every - 1) > COST_SHARE / 2 - 1e-9


@pytest.mark.parametrize("own_test", [True, False])
@pytest.mark.parametrize("every", [None, 1])
def test_without_global_test_samples_a_run_ends_without_test_figures(
    every: int | None, own_test: bool, tmp_path: Path
) -> None:
    task = small_task(own_test)
    task = replace(task, test=task.test[:0])
    run = fl.run(
        "fedmr", task, rounds=3, participation=0.5, evaluate_every=every, directory=tmp_path
    )
    for record in run.history:
        assert not {"accuracy", "loss"} & record.keys()
        assert every is None or ("client_accuracy" in record) == own_test
    assert "pool_cosine" in run.history[-1]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["rounds"], result["accuracy"], result["best_accuracy"]) == (3, None, None)
    assert render("no test samples", [run.summary], (0.5,), "fedloom run")
    for figure in ("accuracy", "best_accuracy"):
        with pytest.raises(
            InvalidValue, match=r"^the test set of 'small' is empty: it gives no test accuracy$"
        ):
            getattr(run, figure)
    assert run.rounds_to(0.5) is None
    for recorder in ("aggregate", "landscape(data=test)"):
        with pytest.raises(InvalidValue, match=r"^record: \w+: the test set of 'small' is empty$"):
            fl.run("fedmr", task, rounds=1, participation=0.5, record=[recorder])


def test_a_partition_without_test_samples_measures_nobody() -> None:
    task = replace(small_task(), local_test=Partition.of([[]] * 6))
    run = federation(FedAvg(), task, rounds=1, personal_every=None)
    run.run()
    assert "personal_accuracy" not in run.history[0]


def test_models_are_scored_in_evaluation_mode() -> None:
    """Evaluation uses the batch norm statistics in the row and no dropout."""
    task = small_task()
    net = task.module(random_row(task, 4)).requires_grad_(False)
    assert isinstance(net, SmallNet)
    evaluator = Evaluator(task.model, task.layout, task.dataset)
    x, y = task.test.inputs, task.test.labels
    hidden = (net.hidden(x) - net.norm.running_mean) / (net.norm.running_var + 1e-5).sqrt()  # type: ignore[operator]
    logits = net.out(torch.relu(hidden * net.norm.weight + net.norm.bias))
    assert evaluator.score(random_row(task, 4), task.test)["loss"] == pytest.approx(
        float(F.cross_entropy(logits, y)), rel=1e-5
    )


def test_metrics_of_each_client_are_recorded_and_undefined_ones_are_empty() -> None:
    labels = np.array([0, 0, 0, 0, 0, 1, 0, 1] * 10)
    owner = np.repeat([0, 1], 40)
    inputs = np.random.default_rng(0).normal(size=(80, 3))
    labels[owner == 0] = 0
    samples = fl.Samples(inputs, labels, owner)

    def mean_target(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return targets.double().mean() if targets.any() else torch.tensor(torch.nan)

    task = fl.make_task(
        (samples, samples),
        clients=0,
        partition="natural",
        model="logistic",
        local_test=0.25,
        metrics=[mean_target],
    )
    result = fl.run("fedavg", task, rounds=1, personal_every=1)
    assert task.local_test is not None
    table = result.federation.client_history[-1]["personal"]
    expected = float(labels[task.local_test[1]].mean())
    assert table["mean_target"] == [None, pytest.approx(expected)]
    assert result.clients().mean_target.isna().tolist() == [True, False] * 2
