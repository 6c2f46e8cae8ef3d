"""Personalised methods: comparison with plain loops in each round, and limiting cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import naive_methods as methods
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.partialfed import PartialFed
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.flat.module import FlatModule
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.rounds.engine import Job, inbox_of
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from naive_personal import (
    Moment,
    Run,
    Setting,
    World,
    assert_same,
    parameters,
    shared_model,
    vector,
)
from small_task import TRAIN_SIZES, small_task

Method = Callable[..., list[Moment]]
PLAIN = Training(learning_rate=0.1, decay=0.9, epochs=2, batch_size=4)


def everybody(norm: bool = False, training: Training | None = None) -> World:
    world = World(norm=norm, participation=1.0, rounds=3)
    return world if training is None else replace(world, training=training)


def require_definition(world: World, expression: str, method: Method, **options: Any) -> Run:
    """Run the expression, compare its models with the naive `method`, and return the run."""
    run = world.run(build(expression))
    assert not any(record["faults"] for record in run.federation.history)
    assert_same(run.moments, method(Setting(world, run.selected), **options))
    return run


def assert_personal(run: Run) -> None:
    """Assert that the first two clients have different models."""
    moment = run.moments[-1]
    assert not torch.allclose(moment.personal[0], moment.personal[1], atol=1e-4)


# --- comparison with plain loops ---


@pytest.mark.parametrize("norm", [False, True])
class TestPartialParticipation:
    def test_fedavg_c_equals_plain_loops(self, norm: bool) -> None:
        assert_personal(
            require_definition(
                World(norm), "fedavg_c(finetune_epochs=3)", methods.fine_tuned, epochs=3
            )
        )

    def test_fedavg_c_for_scoring_only_equals_plain_loops(self, norm: bool) -> None:
        world = World(norm)
        expression = "fedavg_c(finetune_epochs=3, finetune_scope=eval_only)"
        assert_personal(
            require_definition(world, expression, methods.fine_tuned, epochs=3, scoring_only=True)
        )

    def test_fedprox_c_equals_plain_loops(self, norm: bool) -> None:
        assert_personal(
            require_definition(
                World(norm),
                "fedprox_c(finetune_epochs=2, mu=0.3)",
                methods.fine_tuned,
                epochs=2,
                mu=0.3,
            )
        )

    def test_per_fedavg_equals_plain_loops(self, norm: bool) -> None:
        world = World(norm, sizes=(9, 14, 11, 21, 12))
        assert_personal(
            require_definition(
                world, "per_fedavg(alpha=0.2, passes=2)", methods.per_fedavg, alpha=0.2, passes=2
            )
        )

    def test_fedrep_equals_plain_loops(self, norm: bool) -> None:
        assert_personal(
            require_definition(World(norm), "fedrep(head_epochs=3)", methods.fedrep, head_epochs=3)
        )

    def test_pfedme_equals_plain_loops(self, norm: bool) -> None:
        world = World(norm, training=PLAIN)
        expression = "pfedme(regularisation=5, personal_rate=0.05, inner_steps=3, beta=0.7)"
        assert_personal(
            require_definition(
                world, expression, methods.pfedme, strength=5.0, rate=0.05, steps=3, beta=0.7
            )
        )

    def test_ditto_equals_plain_loops(self, norm: bool) -> None:
        expression = "ditto(regularisation=0.5, personal_epochs=3)"
        assert_personal(
            require_definition(World(norm), expression, methods.ditto, strength=0.5, epochs=3)
        )

    def test_fedfomo_equals_plain_loops(self, norm: bool) -> None:
        assert_personal(
            require_definition(World(norm, rounds=5), "fedfomo", methods.fedfomo, most=5)
        )

    def test_fedfomo_with_two_downloads_equals_plain_loops(self, norm: bool) -> None:
        assert_personal(
            require_definition(World(norm, rounds=5), "fedfomo(models=2)", methods.fedfomo, most=2)
        )

    @pytest.mark.parametrize("exploration", [0.5, 1.0])
    def test_fedfomo_that_explores_equals_plain_loops(self, norm: bool, exploration: float) -> None:
        expression = f"fedfomo(models=2, exploration={exploration})"
        assert_personal(
            require_definition(
                World(norm, rounds=5), expression, methods.fedfomo, most=2, exploration=exploration
            )
        )

    def test_fedper_lg_fedavg_and_silobn_equal_plain_loops(self, norm: bool) -> None:
        world = World(norm)
        layers = {"fedper": ("head",), "lg_fedavg": ("lower", "norm", "middle"), "silobn": ()}
        for expression, private in layers.items():
            names = [n for n in world.names if n.split(".")[0] not in private]
            run = require_definition(world, expression, methods.fedavg, names=names)
            if private:
                assert_personal(run)


@pytest.mark.parametrize("deployed", ["history", "local"])
def test_fedphp_equals_plain_loops(deployed: str) -> None:
    world = World(norm=True, training=Training(learning_rate=0.1, batch_size=4, momentum=0.5))
    expression = f"fedphp(mu=0.8, transfer=0.4, deployed={deployed})"
    assert_personal(
        require_definition(
            world, expression, methods.fedphp, mu=0.8, transfer=0.4, deployed=deployed
        )
    )


def test_partialfed_equals_plain_loops() -> None:
    world = World(training=PLAIN)
    run = require_definition(
        world, "partialfed(model_batches=3, strategy_batches=2)", methods.partialfed, pattern=(3, 2)
    )
    assert_personal(run)
    strategies = torch.stack(
        [run.engine.store.read(i)["partialfed_strategy"] for i in run.selected[0]]
    )
    assert bool((strategies[:, :, 0] > 0).any())
    assert bool((strategies[:, :, 0] < 0).any())


def test_fedbn_keeps_its_batch_norm_layer() -> None:
    world = World(norm=True)
    names = [n for n in world.names if not n.startswith("norm.")]
    assert_personal(require_definition(world, "fedbn", methods.fedavg, names=names))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("alpha", "sigma"), [(0.05, 0.5), (1000.0, 0.1)])
def test_fedamp_equals_plain_loops(norm: bool, alpha: float, sigma: float) -> None:
    expression = f"fedamp(alpha={alpha}, sigma={sigma}, regularisation=0.04)"
    assert_personal(
        require_definition(
            everybody(norm), expression, methods.fedamp, alpha=alpha, sigma=sigma, strength=0.04
        )
    )


def test_fedamp_with_the_plain_norm_equals_plain_loops() -> None:
    world = everybody()
    expression = "fedamp(alpha=0.05, sigma=0.5, regularisation=0.04, norm=plain)"
    assert_personal(
        require_definition(
            world, expression, methods.fedamp, alpha=0.05, sigma=0.5, strength=0.04, plain=True
        )
    )


@pytest.mark.parametrize("norm", [False, True])
def test_apple_equals_plain_loops(norm: bool) -> None:
    world = everybody(norm, PLAIN)
    expression = "apple(relation_rate=0.2, mu=0.3, decline=0.8)"
    run = require_definition(
        world, expression, methods.apple, relation_rate=0.2, mu=0.3, decline=0.8
    )
    assert_personal(run)


def test_apple_as_pfllib_has_it() -> None:
    expression = "apple(relation_rate=0.2, mu=0.3, decline=0.8, initial=uniform, variant=pfllib)"
    options: dict[str, Any] = {
        "relation_rate": 0.2,
        "mu": 0.3,
        "decline": 0.8,
        "start": "uniform",
        "pfllib": True,
    }
    assert_personal(
        require_definition(everybody(training=PLAIN), expression, methods.apple, **options)
    )


def test_per_fedavg_without_the_hessian_follows_the_exact_product() -> None:
    world = World(sizes=(13, 14, 12, 26, 15))
    run = world.run(build("per_fedavg(alpha=0.3, variant=hessian_free, delta=0.0001)"))
    exact = methods.per_fedavg(Setting(world, run.selected), alpha=0.3, hessian=True)
    assert_same(run.moments, exact, 1e-6)
    # The second-order correction is significant.
    first_order = methods.per_fedavg(Setting(world, run.selected), alpha=0.3)
    assert not torch.allclose(first_order[-1].parameters, exact[-1].parameters, atol=1e-3)


# --- limiting cases ---


def local_training(world: World, epochs: int, purpose: str) -> list[torch.Tensor]:
    models = [world.fresh() for _ in range(world.clients)]
    for number in range(1, world.rounds + 1):
        for i, model in enumerate(models):
            world.train(model, i, number, purpose, epochs=epochs)
    return [vector(model) for model in models]


def assert_models_equal(models: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for model, reference in zip(models, expected, strict=True):
        torch.testing.assert_close(model, reference, rtol=1e-9, atol=1e-9)


def test_ditto_without_pull_is_local_training_beside_fedavg() -> None:
    world = everybody(norm=True)
    run = world.run(build("ditto(regularisation=0, personal_epochs=2)"))
    assert_models_equal(run.moments[-1].personal, local_training(world, 2, "personal"))
    torch.testing.assert_close(
        run.moments[-1].parameters, world.run(build("silobn")).moments[-1].parameters
    )


def test_fedrep_without_head_epochs_leaves_the_heads() -> None:
    world = everybody()
    run = world.run(build("fedrep(head_epochs=0)"))
    head = slice(-15, None)  # the last parameters are 4 x 3 weights and 3 biases
    for row in run.moments[-1].personal:
        assert torch.equal(row[head], vector(world.module)[head])
    assert not torch.allclose(run.moments[-1].parameters[:-15], vector(world.module)[:-15])


def test_one_pass_through_the_base_serves_all_epochs_of_fedreps_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = everybody()
    passed = []
    features = FlatModule.features

    def counting(
        module: FlatModule, rows: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor | None:
        layer_inputs = features(module, rows, inputs)
        passed.append(0 if layer_inputs is None else inputs.shape[1])
        return layer_inputs

    monkeypatch.setattr(FlatModule, "features", counting)
    once = world.run(build("fedrep(head_epochs=4)")).moments[-1]
    assert sum(passed) == world.rounds * sum(world.sizes)
    monkeypatch.setattr(FlatModule, "features", lambda *_: None)
    by_epoch = world.run(build("fedrep(head_epochs=4)")).moments[-1]
    assert_models_equal(once.personal, by_epoch.personal)
    torch.testing.assert_close(once.parameters, by_epoch.parameters)


def test_fedfomo_of_a_single_client_is_local_training_on_its_training_part() -> None:
    world = World(participation=1.0, sizes=(20,))
    run = world.run(build("fedfomo"))
    model = world.fresh()
    x, y = world.data(0)
    training_rows = torch.randperm(20, generator=stream(world.seed, "fedfomo", client=0))[:16]
    for number in range(1, world.rounds + 1):
        world.train(model, 0, number, data=(x[training_rows], y[training_rows]))
    assert_models_equal(run.moments[-1].personal, [vector(model)])


def test_apple_with_a_one_hot_relation_is_local_training() -> None:
    world = World(sizes=(9,), participation=1.0, training=PLAIN)
    run = world.run(build("apple(relation_rate=0)"))
    assert_models_equal(run.moments[-1].personal, local_training(world, 2, "batches"))


class Decided(PartialFed):
    """PartialFed with a fixed strategy.

    `bias` sets the logits of the download 1000 above or below the local logits.
    """

    bias = 1000.0

    def _logits(self, cohort: Cohort) -> torch.Tensor:
        logits = super()._logits(cohort).clone()
        logits[:, :, 0] = self.bias
        return logits


def test_partialfed_with_everything_global_is_fedavg() -> None:
    world = World(training=PLAIN)
    run = world.run(Decided(strategy_batches=0))
    expected = world.run(FedAvg())
    assert_same(run.moments, expected.moments, 1e-12)


def test_partialfed_with_everything_local_never_mixes() -> None:
    world = everybody(training=PLAIN)
    method = Decided(strategy_batches=0)
    method.bias = -1000.0
    run = world.run(method)
    assert_models_equal(run.moments[-1].personal, local_training(world, 2, "batches"))


def test_per_fedavg_with_alpha_zero_trains_on_second_halves() -> None:
    world = World()
    run = world.run(build("per_fedavg(alpha=0)"))

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> None:
        optimizer = world.optimizer(start, world.rate(t))
        for x, y in world.batches(i, t, times=2, drop_last=True):
            half = len(y) // 2
            optimizer.zero_grad()
            F.cross_entropy(start(x[half : 2 * half]), y[half : 2 * half]).backward()
            nn.utils.clip_grad_norm_(start.parameters(), 1.5)
            optimizer.step()

    assert_same(run.moments, shared_model(Setting(world, run.selected), work, lambda m, i, t: m))


def test_fedamp_without_pull_is_local_training() -> None:
    world = everybody()
    run = world.run(build("fedamp(regularisation=0)"))
    assert_models_equal(run.moments[-1].personal, local_training(world, 2, "batches"))


def test_fedphp_without_transfer_uploads_what_fedavg_does() -> None:
    world = World()
    run = world.run(build("fedphp(transfer=0, mu=0)"))
    expected = world.run(FedAvg())
    torch.testing.assert_close(run.moments[-1].parameters, expected.moments[-1].parameters)


def test_pfedme_without_regularisation_leaves_the_global_model() -> None:
    world = World(training=PLAIN)
    run = world.run(build("pfedme(regularisation=0)"))
    torch.testing.assert_close(
        run.moments[-1].parameters, parameters(world.module), rtol=0, atol=1e-12
    )


def test_averaged_buffers_make_silobn_fedavg() -> None:
    world = World(norm=True)
    run, expected = world.run(build("silobn(buffers=average)")), world.run(FedAvg())
    assert_same(run.moments, expected.moments, 1e-12)


# --- time of evaluation ---


@pytest.mark.parametrize("expression", ["fedrep", "fedper", "per_fedavg"])
def test_after_train_scores_the_locally_trained_model(expression: str) -> None:
    world = everybody(norm=True)
    run = world.run(build(f"{expression}(eval_point=after_train)"))
    stored = [run.engine.store.read(i)["trained"] for i in range(world.clients)]
    assert_models_equal(run.moments[-1].personal, stored)
    begun = world.run(build(expression))
    torch.testing.assert_close(begun.moments[-1].parameters, run.moments[-1].parameters)
    assert not torch.allclose(begun.moments[-1].personal[0], stored[0], atol=1e-4)


ALL = [
    "fedavg_c(finetune_epochs=2)", "fedprox_c(finetune_epochs=2)", "per_fedavg", "per_fedavg(variant=hessian_free)", "fedrep",
    "pfedme(regularisation=5)", "ditto", "fedamp", "fedphp", "fedfomo", "fedfomo(models=2)", "apple", "partialfed", "fedper",
    "lg_fedavg", "silobn", "fedbn", "fedala", "ala(fedrep)", "ala(fedprox)",
]  # fmt: skip


@pytest.mark.parametrize("expression", ALL)
def test_evaluation_changes_nothing(expression: str) -> None:
    """Evaluations do not change the final memory, statistics and model of a run."""
    world = everybody(norm=True, training=PLAIN)
    evaluated = world.run(build(expression)).federation
    task = world.task()
    engine = RowsEngine(task)
    schedule = Schedule(rounds=3, participation=1.0, seed=world.seed, evaluate_every=100)
    federation = Federation(build(expression), task, engine, schedule)
    federation.run()
    assert torch.equal(federation.model(), evaluated.model())
    assert torch.equal(federation.integers, evaluated.integers)
    ours, theirs = engine.memory(), evaluated.engine.memory()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- traffic in the messages ---


@pytest.mark.parametrize(
    ("expression", "down", "up"),
    [
        ("fedala", 1, 1), ("ala(fedprox)", 1, 1), ("fedavg_c", 1, 1), ("per_fedavg", 1, 1), ("pfedme(regularisation=5)", 1, 1),
        ("ditto", 1, 1), ("fedamp", 1, 1), ("fedphp", 1, 1), ("partialfed", 1, 1), ("fedfomo", 5, 1), ("apple", 5, 1),
    ],
)  # fmt: skip
def test_traffic_is_that_many_models_down_and_up(expression: str, down: int, up: int) -> None:
    world = everybody(training=PLAIN)
    size = 8 * len(vector(world.module))
    record = world.run(build(expression)).federation.history[-1]
    beside = 5 * 8 * world.clients  # one number per model: FedFomo's values and APPLE's shares
    assert record["bytes_down"] - down * size * world.clients in (0, beside)
    assert record["bytes_up"] - up * size * world.clients in (0, beside)


@pytest.mark.parametrize("engine", [RowsEngine, StackedEngine])
@pytest.mark.parametrize("method", ["silobn", "fedbn", "fedper", "fedper(buffers=average)"])
def test_batch_norm_counters_stay_with_the_clients_of_partly_private_models(
    method: str, engine: type[RowsEngine]
) -> None:
    """Each client's counter counts its own batches, without any transfer or traffic."""
    task = replace(small_task(), training=Training(learning_rate=0.05, batch_size=4))
    local_engine = engine(task)
    run = Federation(
        build(method),
        task,
        local_engine,
        Schedule(rounds=4, participation=0.5, seed=1, personal_every=1),
    )
    run.run()
    assert task.layout.integers == 1
    expected = run.algorithm.expects(run._first)["model"][0]
    uploads = [client for record in run.history for client in record["clients"]]
    for record in run.history:
        assert not record["faults"]
        assert record["bytes_up"] == 4 * expected * len(record["clients"])
    assert run.integers.tolist() == [0]
    upcoming = run._first.at(5)
    message = run.algorithm.deploy(upcoming, tuple(range(task.clients)))
    for client in range(task.clients):
        job = Job(client, None, inbox_of(message, client))
        ((_, _, counter),) = local_engine.personalised(run.algorithm, upcoming, [job])
        batches = uploads.count(client) * -(-TRAIN_SIZES[client] // 4)
        skipped = uploads.count(client) * (TRAIN_SIZES[client] % 4 == 1)
        assert counter is not None
        assert counter.tolist() == [batches - skipped]


def test_counters_of_batch_norm_travel_with_whole_models() -> None:
    task = replace(small_task(), training=Training(learning_rate=0.05, batch_size=4))
    run = Federation(
        build("silobn(buffers=average)"),
        task,
        RowsEngine(task),
        Schedule(rounds=2, participation=1.0),
    )
    run.run()
    assert (
        run.history[0]["bytes_down"] == run.history[0]["bytes_up"] == 6 * (4 * task.layout.size + 8)
    )
    assert run.integers.tolist() == [2 * 3]


@pytest.mark.parametrize(
    ("expression", "parameters"),
    [("fedrep", 64), ("ala(fedrep)", 64), ("fedper", 64), ("lg_fedavg", 15)],
)
def test_only_shared_layers_travel(expression: str, parameters: int) -> None:
    record = everybody().run(build(expression)).federation.history[-1]
    assert record["bytes_down"] == record["bytes_up"] == 8 * parameters * 5


def test_statistics_travel_only_when_they_are_averaged() -> None:
    world = everybody(norm=True)
    averaged = 103 + 1  # including the mean, variance and batch count of batch norm
    for expression, size in (("silobn", 91), ("silobn(buffers=average)", averaged), ("fedbn", 79)):
        record = world.run(build(expression)).federation.history[-1]
        assert record["bytes_down"] == record["bytes_up"] == 8 * size * 5, expression


# --- errors ---


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("fedbn", "use fedavg"),
        ("lg_fedavg(global_blocks=0)", "global_blocks must be at least 1"),
        ("fedper(personal_blocks=3)", "would stay with the clients"),
        ("fedrep(eval_point=later)", "eval_point"),
        ("fedamp(sigma=0)", "sigma must be greater than 0"),
        ("fedfomo(train_share=0)", "train_share"),
        ("partialfed(cooling=1.5)", "cooling"),
        ("pfedme(regularisation=30)", "diverges"),
    ],
)
def test_bad_expressions_are_refused_in_one_line(expression: str, words: str) -> None:
    with pytest.raises(InvalidValue, match=words) as caught:
        everybody(training=PLAIN).run(build(expression))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("expression", ["fedamp", "apple"])
def test_methods_of_full_participation_refuse_less(expression: str) -> None:
    with pytest.raises(InvalidValue, match="participation must be 1, not 3 of 5"):
        World().run(build(expression))


def test_pfedme_warns_of_overshooting() -> None:
    with pytest.warns(UserWarning, match="overshoots"):
        World(training=PLAIN, rounds=1).run(build("pfedme"))


def test_an_absent_client_keeps_its_last_model_in_the_mixtures() -> None:
    """The server retains an absent client's last model, and the client's memory is unchanged."""
    world = everybody(training=PLAIN)
    for expression in ("fedamp", "apple", "fedfomo"):
        task = world.task()
        engine = RowsEngine(task)
        schedule = Schedule(rounds=6, participation=1.0, seed=1, dropout=0.4, evaluate_every=100)
        federation = Federation(build(expression), task, engine, schedule)
        while not federation.history or not federation.history[-1]["faults"]:
            memory = engine.memory()
            federation.step()
        absent = federation.history[-1]["faults"][0]["client"]
        later_memory = engine.memory()
        names = [name for name in memory if name.startswith(f"{absent}/")]
        assert all(torch.equal(memory[name], later_memory[name]) for name in names), expression
        federation.step()
        assert bool(torch.isfinite(federation.model()).all())


@pytest.mark.parametrize(
    ("expression", "private_layers"),
    [
        ("fedrep", True),
        ("fedper", True),
        ("lg_fedavg", True),
        ("pfedfda", False),  # the head is computed from the transmitted tensors
        ("fedavg", False),
        ("ditto", False),
        ("fedmr", False),
    ],
)
def test_a_notice_names_layers_that_never_leave_the_clients(
    expression: str, private_layers: bool
) -> None:
    task = World().task()
    federation = Federation(
        build(expression), task, RowsEngine(task), Schedule(rounds=1, participation=1.0)
    )
    named = [text for text in federation.notices if "never changes" in text]
    assert len(named) == private_layers
    if private_layers:
        federation.step()
        layout, start = task.layout, task.initial
        untouched = {
            tensor.layer
            for tensor in layout.slices
            if torch.equal(federation.model()[tensor.slice], start[tensor.slice])
        }
        assert untouched
        assert all(layer in named[0] for layer in untouched)
        assert federation.timings[0]["notices"][0] == named[0]
