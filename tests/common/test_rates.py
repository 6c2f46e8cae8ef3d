"""Learning rates by round, step and client, and user optimizers.

algorithms/test_fedavg.py tests a round with a scheduler from torch.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedloom as fl
from batch_order import batch_order
from fedloom.algorithm.records import Message
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import CheckpointError, FedloomError
from fedloom.common.randomness import stream
from fedloom.common.rates import rate_factor
from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from own_optimizers import Grouped, Normed, Sign
from small_task import small_task


@pytest.mark.parametrize(
    ("expression", "formula"),
    [
        ("constant", lambda t: 1),
        ("cosine", lambda t: (1 + math.cos(math.pi * t / 10)) / 2),
        (
            "cosine(over=4, least=0.2)",
            lambda t: 0.2 + 0.8 * (1 + math.cos(math.pi * min(t, 4) / 4)) / 2,
        ),
        ("step(3, factor=0.5)", lambda t: 0.5 ** (t // 3)),
        ("warmup(4)", lambda t: min(1, (t + 1) / 4)),
        (
            "warmup(4, then=cosine)",
            lambda t: (t + 1) / 4 if t < 4 else (1 + math.cos(math.pi * (t - 4) / 6)) / 2,
        ),
        (
            "warmup(2, then=own_optimizers:falling)",
            lambda t: (t + 1) / 2 if t < 2 else 1 - (t - 2) / 8,
        ),
        ("own_optimizers:falling", lambda t: 1 - t / 10),
    ],
)
def test_the_named_schedules_follow_their_formulas(
    expression: str, formula: Callable[[int], float]
) -> None:
    assert [rate_factor(expression, t, 10) for t in range(10)] == pytest.approx(
        [formula(t) for t in range(10)]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"schedule": "cosin"},
            "schedule: unknown learning-rate schedule 'cosin': did you mean 'cosine'?",
        ),
        ({"schedule": "step"}, "schedule: step needs every"),
        ({"local_schedule": "step(0)"}, "local_schedule: step: every must be at least 1, not 0"),
        ({"schedule": "warmup(5, then=cosin)"}, "did you mean 'cosine'?"),
        ({"schedule": "own_optimizers:fallin"}, "has no 'fallin': did you mean 'falling'?"),
        ({"optimizer": "own_optimizers:Sing"}, "has no 'Sing': did you mean 'Sign'?"),
        (
            {"optimizer": "own_optimizers:no_optimizer"},
            "it returned None, not a torch.optim.Optimizer",
        ),
        (
            {"optimizer": "own_optimizers:Tensor"},
            "'own_optimizers:Tensor' must be a subclass of torch.optim.Optimizer",
        ),
        ({"optimizer": lambda params, lr: Sign(params, lr)}, "at the top level of a module (the"),
        ({"optimizer": partial(Sign, smoothing=0.1)}, "at the top level of a module (the path of"),
        ({"optimizer": "torch.optim:LBFGS"}, "LBFGS refuses"),
        ({"optimizer": "adm"}, "or a class or function, not 'adm': did you mean 'adam'?"),
        (
            {"optimizer": "own_optimizers:Sign", "optimizer_options": {"smooth": 1.0}},
            "own_optimizers:Sign has no option 'smooth': did you mean 'smoothing'? (it has: "
            "smoothing)",
        ),
        (
            {"optimizer": "own_optimizers:Sign", "optimizer_options": {"smoothing": True}},
            "smoothing must be finite and neither true nor false",
        ),
    ],
)
def test_bad_rates_and_optimizers_are_refused_in_one_line(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedloomError) as error:
        Training(**settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def begun(
    algorithm: FedAvg | str, stacked: bool = False, rounds: int = 2, **settings: Any
) -> Federation:
    task = replace(
        small_task(),
        training=Training(**{"learning_rate": 0.1, "batch_size": 4, "epochs": 2, **settings}),
    )
    engine = StackedEngine(task) if stacked else RowsEngine(task)
    return Federation(
        build(algorithm), task, engine, Schedule(rounds, 1.0, 3, evaluate_every=rounds)
    )


def run(
    algorithm: FedAvg | str, stacked: bool = False, rounds: int = 2, **settings: Any
) -> Federation:
    federation = begun(algorithm, stacked, rounds, **settings)
    federation.run()
    return federation


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.5, "weight_decay": 0.01},
        {"optimizer": "adam", "learning_rate": 0.02, "optimizer_options": {"eps": 1e-3}},
        {"optimizer": "own_optimizers:Sign", "clip": 0.3},
        {"optimizer": "own_optimizers:Normed"},
        {"optimizer": "own_optimizers:Grouped", "momentum": 0.5, "learning_rate": 0.02},
    ],
)
def test_clients_of_unequal_steps_have_the_rates_of_rows_in_a_stack(
    settings: dict[str, Any],
) -> None:
    changing = {"schedule": "warmup(2)", "local_schedule": "warmup(2, then=cosine)", **settings}
    stacked, expected = run("fedavg", stacked=True, **changing), run("fedavg", **changing)
    torch.testing.assert_close(stacked.model(), expected.model(), rtol=0, atol=2e-5)
    constant = run("fedavg", **settings)
    assert (constant.model() - expected.model()).abs().max() > 1e-3
    joint = [
        notice
        for notice in stacked.notices
        if notice.startswith("each client has its own optimizer")
    ]
    assert bool(joint) == settings.get("optimizer", "").endswith(("Normed", "Grouped")), (
        "which shortcut proves itself"
    )


@pytest.mark.parametrize("kind", [Sign, Normed, Grouped])
def test_a_users_optimizer_sees_the_models_tensors(kind: type[torch.optim.Optimizer]) -> None:
    federation = run("fedavg", rounds=1, epochs=1, optimizer=f"own_optimizers:{kind.__name__}")
    task = federation.task
    server = {name: torch.zeros_like(tensor) for name, tensor in task.model.named_parameters()}
    for client in range(task.clients):
        module = copy.deepcopy(task.model).train()
        optimizer = kind(module.parameters(), lr=0.1)
        samples = task.samples(client)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            torch.set_rng_state(stream(3, "layers", round=1, client=client).get_state())
            order = batch_order(
                len(samples), stream(3, "batches", round=1, client=client), batch_size=4, smallest=2
            )
            for index in order:
                optimizer.zero_grad()
                F.cross_entropy(module(samples.inputs[index]), samples.labels[index]).backward()
                optimizer.step()
        for name, parameter in module.named_parameters():
            server[name] += parameter.detach() * len(samples) / len(task.partition.indices)
    trained = dict(task.module(federation.model()).named_parameters())
    for name, tensor in server.items():
        torch.testing.assert_close(trained[name].detach(), tensor, rtol=1e-4, atol=1e-6)


def test_schedules_scale_the_rate_of_each_group_of_parameters() -> None:
    """A local training with decreasing rate equals one with the schedulers of torch."""
    task = replace(
        small_task(own_test=False),
        model=nn.Linear(5, 4),
        training=Training(
            learning_rate=0.05,
            batch_size=4,
            optimizer="own_optimizers:Grouped",
            local_schedule="own_optimizers:falling",
        ),
    )
    task = replace(task, partition=task.partition.take([0]))
    federation = Federation(build("fedavg"), task, RowsEngine(task), Schedule(1, 1.0, 3))
    federation.run()
    samples, module = task.samples(0), copy.deepcopy(task.model)
    optimizer = Grouped(module.parameters(), lr=0.05)
    order = batch_order(len(samples), stream(3, "batches", round=1, client=0), batch_size=4)
    batches = list(order)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / len(batches))
    for index in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(samples.inputs[index]), samples.labels[index]).backward()
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(
        federation.model(), task.layout.flatten(module), rtol=1e-5, atol=1e-6
    )


class OwnRates(FedAvg):
    """FedAvg with client-specific rates.

    Client i trains at i tenths of the round's rate, and client 0 at the full rate.
    """

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        share = torch.tensor([client / 10 or 1.0 for client in cohort.clients], dtype=torch.float64)
        return {
            "model": cohort.fit(
                inbox["model"], learning_rate=share * cohort.round.learning_rate
            ).model
        }


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.5}, {"optimizer": "adam", "optimizer_options": {"eps": 1e-3}}]
)
def test_each_client_may_have_its_rate(settings: dict[str, Any]) -> None:
    stacked, expected = run(OwnRates(), stacked=True, **settings), run(OwnRates(), **settings)
    torch.testing.assert_close(stacked.model(), expected.model(), rtol=0, atol=2e-5)
    assert (expected.model() - run("fedavg", **settings).model()).abs().max() > 1e-3


@pytest.mark.parametrize(
    "method", ["scaffold", "feddc", "fednova", "pfedme(regularisation=5)", "partialfed", "apple"]
)
def test_methods_that_need_one_rate_a_round_refuse_schedules(method: str) -> None:
    name = method.partition("(")[0]
    with pytest.raises(
        FedloomError, match=rf"^{name}[^\n]+ local_schedule must be constant, not 'cosine'$"
    ):
        begun(method, local_schedule="cosine")


@pytest.mark.parametrize(
    "method", ["scaffold", "feddc", "fednova", "ala(scaffold)", "stages(fedavg:1, feddc)"]
)
def test_methods_that_read_gradients_off_the_steps_say_so_at_set_up(method: str) -> None:
    with pytest.raises(FedloomError, match=r"optimizer must be sgd, not adam$"):
        begun(method, optimizer="adam")


def test_pfedme_refuses_a_rate_at_which_it_diverges_at_set_up() -> None:
    with pytest.raises(FedloomError, match="at 2 or more the local model diverges"):
        begun("pfedme(regularisation=30)")


def test_a_schedule_that_gives_no_rate_is_refused_before_the_first_round() -> None:
    with pytest.raises(
        FedloomError,
        match=r"^schedule 'own_optimizers:never' gives 0 after 1 of 2: it must be a positive",
    ):
        run("fedavg", schedule="own_optimizers:never")


def test_a_run_is_lengthened_only_if_the_rates_of_its_rounds_stay(tmp_path: Path) -> None:
    def go_on(schedule: str, rounds: int, name: str) -> Tensor:
        task = replace(
            small_task(), training=Training(learning_rate=0.1, batch_size=4, schedule=schedule)
        )
        directory = tmp_path / name
        result = fl.run(
            "umf(fedavg, simulate_all=true)",
            task,
            rounds=rounds,
            participation=0.5,
            directory=directory,
            engine="rows",
        )
        return result.federation.model()

    schedule = "cosine(over=6, least=0.1)"
    go_on(schedule, 2, "lengthened")
    assert torch.equal(go_on(schedule, 4, "lengthened"), go_on(schedule, 4, "at once"))
    go_on("cosine", 2, "cosine")
    with pytest.raises(
        CheckpointError, match=r"learning rates of training.schedule = 'cosine' depend on how many"
    ):
        go_on("cosine", 4, "cosine")


def test_linear_layers_are_not_folded_where_rates_change_from_step_to_step() -> None:
    def folded(**training: str) -> bool:
        task = fl.make_task("digits", clients=4, model="mlp(hidden=[8])", training=training)
        return StackedEngine(task).stack.folded(task.training, 0.1) is not None

    assert folded(schedule="cosine")
    assert not folded(local_schedule="cosine")


def made(params: Iterable[Tensor], lr: float, smoothing: float = 0.2) -> Sign:
    """Return an optimizer of a function, which a path can name."""
    return Sign(params, lr, smoothing)


@pytest.mark.parametrize("make", [Sign, made])
def test_a_class_or_function_equals_its_path(make: Callable[..., Sign]) -> None:
    options: dict[str, Any] = {"optimizer_options": {"smoothing": 0.3}, "learning_rate": 0.05}
    path = f"{make.__module__}:{make.__qualname__}"
    given = Training(optimizer=make, **options)
    named = Training(optimizer=path, **options)
    assert given == named
    assert json.loads(json.dumps(asdict(given)))["optimizer"] == path
    assert torch.equal(
        run("fedavg", optimizer=make, **options).model(),
        run("fedavg", optimizer=path, **options).model(),
    )
    assert Training(optimizer=torch.optim.Adam).optimizer == "adam"
    assert fl.Entry("fedavg", optimizer=make).settings == {"optimizer": path}


def test_workers_get_a_class_of_the_main_program() -> None:
    """Check a class that no other process can import, as in a notebook."""
    kind = type("Own", (Sign,), {"__module__": "__main__", "__qualname__": "Own"})
    training = Training(learning_rate=0.05, optimizer=kind)
    assert training.optimizer == "__main__:Own"
    task = replace(small_task(), training=training)
    options: dict[str, Any] = {"rounds": 1, "participation": 1.0, "quiet": True}
    workers = fl.run("fedavg", task, engine="processes(workers=2)", **options)
    assert workers.configuration["training"]["optimizer"] == "__main__:Own"
    expected = fl.run("fedavg", task, engine="rows", **options)
    assert torch.equal(workers.federation.model(), expected.federation.model())


def test_a_resumed_run_with_another_class_is_refused(tmp_path: Path) -> None:
    def start(optimizer: Any, rounds: int) -> fl.Result:
        training = Training(learning_rate=0.05, optimizer=optimizer)
        task = replace(small_task(), training=training)
        return fl.run("fedavg", task, rounds=rounds, directory=tmp_path, engine="rows", quiet=True)

    start(Sign, 1)
    with pytest.raises(CheckpointError, match=r"training\.optimizer = 'own_optimizers:Sign'"):
        start(made, 2)
    assert len(start("own_optimizers:Sign", 2).history) == 2
