"""Compressed traffic: compare each code with plain Python, and check the bytes sent and nested
codes.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.algorithm.records import INTEGERS, Message
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import InvalidValue
from fedloom.engines.rows import RowsEngine
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.parts.codec import Codec
from fedloom.parts.lowrank import LowRank, low_rank
from fedloom.parts.pipeline import Pipeline
from fedloom.parts.quantised import Quantised, dequantise, quantise
from fedloom.parts.sparse import Sparse
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from small_task import small_task


@cache
def task() -> Task:
    return small_task()


def federation(expression: str, rounds: int = 3, participation: float = 0.5) -> Federation:
    schedule = Schedule(rounds=rounds, participation=participation, evaluate_every=1)
    return Federation(build(expression), task(), RowsEngine(task()), schedule)


def run_federation(expression: str, rounds: int = 3, participation: float = 0.5) -> Federation:
    simulation = federation(expression, rounds, participation)
    simulation.run()
    assert all(record["faults"] == [] for record in simulation.history)
    return simulation


# --- the codes, number by number ---

NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40)


@given(NUMBERS, st.sampled_from([1, 2, 4, 8]), st.integers(1, 9), st.data())
@settings(max_examples=40, deadline=None)
def test_quantisation_equals_plain_python(
    numbers: list[float], bits: int, bucket: int, data: st.DataObject
) -> None:
    drawn = data.draw(
        st.none() | st.lists(st.floats(0, 0.99), min_size=len(numbers), max_size=len(numbers))
    )
    rows = torch.tensor([numbers], dtype=torch.float64)
    levels, scales = quantise(
        rows, bits, bucket, None if drawn is None else torch.tensor([drawn]).double()
    )
    assert levels.dtype == torch.uint8
    assert levels.shape == (1, math.ceil(len(numbers) * bits / 8))
    expected, stream = [], ""
    for index, number in enumerate(numbers):
        bucket_numbers = numbers[index // bucket * bucket :][:bucket]
        low, step = min(bucket_numbers), (max(bucket_numbers) - min(bucket_numbers)) / (2**bits - 1)
        level = (
            math.floor((number - low) / step + (0.5 if drawn is None else drawn[index]))
            if step
            else 0
        )
        expected.append(low + min(level, 2**bits - 1) * step)
        stream = f"{min(level, 2**bits - 1):0{bits}b}" + stream
    assert dequantise(levels, scales, len(numbers), bits, bucket)[0].tolist() == pytest.approx(
        expected, abs=1e-9
    )
    # Check the bit order: the first number has the lowest bits.
    assert int(stream, 2) == int.from_bytes(bytes(levels[0].tolist()), "little")


def test_random_rounding_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(1, 64, generator=generator)
    for bits in (1, 2, 4):
        drawn = torch.rand(4000, 64, generator=generator)
        rounded = dequantise(*quantise(row.expand(4000, -1), bits, 16, drawn), 64, bits, 16)
        step = (row.max() - row.min()) / (2**bits - 1)
        assert float((rounded.mean(0) - row).abs().max()) < 4 * 0.5 * float(step) / math.sqrt(4000)
        assert float((rounded - row).abs().max()) <= float(step)


@given(NUMBERS, st.floats(0.01, 1.0))
@settings(max_examples=40, deadline=None)
def test_the_largest_numbers_travel_in_ascending_order_of_index(
    numbers: list[float], share: float
) -> None:
    code, row = Sparse(FedAvg(), share=share), torch.tensor([numbers])
    encoded = code.encode_rows(row, list, task().layout)
    count = max(1, math.floor(share * len(numbers) + 1e-9))
    indices = encoded["indices"][0].tolist()
    assert len(indices) == count
    assert indices == sorted(set(indices))
    assert encoded["values"][0].tolist() == row[0, indices].tolist()
    assert (
        sorted(map(abs, encoded["values"][0].tolist()))
        == sorted(map(abs, row[0].tolist()))[-count:]
    )
    decoded = code.decode_rows(encoded, len(numbers), task().layout)[0]
    assert decoded.tolist() == [
        number if k in indices else 0 for k, number in enumerate(row[0].tolist())
    ]


def test_indices_out_of_range_count_as_nothing() -> None:
    encoded = {
        "indices": torch.tensor([[-1, 2, 9]], dtype=torch.int32),
        "values": torch.tensor([[5.0, 1.0, 7.0]]),
    }
    assert Sparse(FedAvg()).decode_rows(encoded, 4, task().layout).tolist() == [[0, 0, 1, 0]]


def test_low_rank_codes_are_exact_for_low_rank_and_near_the_best_approximation_otherwise() -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 9, 3, generator=generator), torch.randn(2, 7, 3, generator=generator)
    start = torch.randn(2, 7, 3, generator=generator)
    p, q = low_rank(u @ v.mT, start)
    torch.testing.assert_close(p @ q.mT, u @ v.mT, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(p.mT @ p, torch.eye(3).expand(2, 3, 3), rtol=1e-5, atol=1e-5)
    full = torch.randn(2, 9, 7, generator=generator) * torch.tensor([8.0, 4, 2, 0.5, 0.2, 0.1, 0.1])
    p, q = low_rank(full, start)
    best = torch.linalg.svdvals(full)[:, 3:].square().sum(1).sqrt()
    assert bool(((full - p @ q.mT).flatten(1).norm(dim=1) < 1.2 * best).all())


# --- the rounds ---


class Watched(FedAvg):
    """FedAvg that stores the clients' updates before any code."""

    updates: ClassVar[dict[tuple[int, int], Tensor]]

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        reply = super().train(cohort, inbox)
        self.updates[cohort.round.number, cohort.clients[0]] = reply["model"][0] - inbox["model"][0]
        return {name: rows.clone() for name, rows in reply.items()}


def watched(code: type[Codec], **options: Any) -> tuple[Federation, Watched, list[Tensor]]:
    """Run three rounds with all clients; return the run, the method with its updates, and all
    models from the initial one.
    """
    inner = Watched(weighted=False)
    Watched.updates = {}
    schedule = Schedule(rounds=3, participation=1.0)
    simulation = Federation(code(inner, **options), task(), RowsEngine(task()), schedule)
    models = [simulation.model().clone()]
    for _ in range(3):
        simulation.step()
        models.append(simulation.model().clone())
    return simulation, inner, models


def test_sparse_updates_with_feedback_equal_plain_python() -> None:
    _, inner, models = watched(Sparse, share=0.05)
    count, size = task().clients, task().layout.trainable
    count_sent = max(1, int(0.05 * size))
    error = np.zeros((count, size), np.float32)
    for number in (1, 2, 3):
        total = np.zeros(size, np.float64)
        for client in range(count):
            update = inner.updates[number, client][:size].numpy() + error[client]
            largest = np.argsort(-np.abs(update), kind="stable")[:count_sent]
            sent = np.zeros(size, np.float32)
            sent[largest] = update[largest]
            error[client] = update - sent
            total += sent
        expected = models[number - 1][:size].numpy() + total / count
        np.testing.assert_allclose(models[number][:size].numpy(), expected, rtol=1e-5, atol=1e-6)
        statistics = torch.stack(
            [inner.updates[number, client][size:] for client in range(count)]
        ).mean(0)
        torch.testing.assert_close(
            models[number][size:], models[number - 1][size:] + statistics, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(("code", "options"), [(Sparse, {"share": 0.05}), (LowRank, {"rank": 1})])
def test_error_feedback_remembers_the_unsent_remainder(
    code: type[Codec], options: dict[str, Any]
) -> None:
    """Error feedback loses nothing of a client's updates.

    w_0 + mean of all updates = w_3 + mean of the remainders.
    """
    run, inner, models = watched(code, **options)
    size = task().layout.trainable
    name = f"{code.__name__.lower()}_error_model_{size}"
    remainders = torch.stack([run.engine.memory()[f"{client}/{name}"] for client in range(6)])
    total_updates = torch.stack(
        [
            torch.stack([inner.updates[n, client][:size] for n in (1, 2, 3)]).sum(0)
            for client in range(6)
        ]
    )
    assert float(remainders.norm()) > 0
    torch.testing.assert_close(
        models[0][:size] + total_updates.mean(0),
        models[3][:size] + remainders.mean(0),
        rtol=1e-4,
        atol=1e-5,
    )


def test_full_share_full_rank_and_buckets_of_one_are_the_inner_method() -> None:
    expected = run_federation("fedavg").model()
    for text in ("sparse(fedavg, share=1.0)", "lowrank(fedavg, rank=100)"):
        torch.testing.assert_close(run_federation(text).model(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        run_federation("quantised(fedavg, bucket=1)").model(), expected, rtol=1e-4, atol=1e-5
    )


def test_the_server_keeps_the_exact_model_when_downloads_are_coded() -> None:
    inner = Watched(weighted=False)
    Watched.updates = {}
    method = Quantised(inner, down=1, bucket=4096, stochastic=False)
    schedule = Schedule(rounds=3, participation=1.0, evaluate_every=1)
    simulation = Federation(method, task(), RowsEngine(task()), schedule)
    pipeline = simulation.pipeline
    exact = simulation.model().clone()
    opening = pipeline.plan.opening()
    coded = pipeline.open(opening, pipeline.select(opening)).wire
    size = task().layout.trainable
    sent = dequantise(coded["model.levels"], coded["model.scales"], size, 1, 4096)[0]
    assert coded["model.rest"].tolist() == [exact[size:].tolist()]  # statistics
    assert set(sent.tolist()) == {
        float(exact[:size].min()),
        float(exact[:size].max()),
    }  # one bit: clients start far from the model
    simulation.step()
    moved = torch.stack(list(inner.updates.values()))
    step = (
        float(moved[:, :size].max() - moved[:, :size].min()) / 255
    )  # a step of 8 bits, far smaller than a step of one bit
    torch.testing.assert_close(simulation.model(), exact + moved.mean(0), rtol=1e-5, atol=step)
    assert step < 0.05 * float(exact[:size].max() - exact[:size].min())


def numbers_sent(expression: str) -> tuple[float, float]:
    """Return the bytes down and up of one client in the last round, without the buffers of batch
    norm.
    """
    record = run_federation(expression).history[-1]
    layout = task().layout
    buffers = 8 * layout.integers + 4 * (layout.size - layout.trainable)
    return tuple(
        record[name] / len(record["clients"]) - buffers for name in ("bytes_down", "bytes_up")
    )  # type: ignore[return-value]


def test_counted_bytes_equal_the_packed_arrays() -> None:
    size = task().layout.trainable
    model_bytes = 4 * size
    for bits in (1, 2, 4, 8):
        packed = math.ceil(size * bits / 8) + 8 * math.ceil(size / 50)
        assert numbers_sent(f"quantised(fedavg, bits={bits}, bucket=50)") == (model_bytes, packed)
        assert numbers_sent(f"quantised(fedavg, bits=8, down={bits}, bucket=50)")[0] == packed
    count = int(0.1 * size)
    assert numbers_sent("sparse(scaffold, share=0.1)") == (2 * model_bytes, 2 * 8 * count)
    # For 5 x 6 and 6 x 4 weights, rank 1 sends 11 and 10 numbers. All others are unchanged.
    assert numbers_sent("lowrank(fedavg, rank=1)") == (
        model_bytes,
        model_bytes - 4 * (30 - 11 + 24 - 10),
    )
    nested = 4 * count + count + 8
    down = size + 8
    assert numbers_sent("quantised(sparse(fedavg, share=0.1), bits=8, down=8)") == (down, nested)


@pytest.mark.parametrize(
    "expression",
    [
        "quantised(fedmr, bits=4, down=8)",
        "quantised(umf(fedmr), down=4)",
        "sparse(ala(fedavg, max_epochs=2))",
        "quantised(robust(fedavg, rule=median))",
        "quantised(clustered(fedavg))",
        "quantised(fedper, down=4)",
        "sparse(fedrep, share=0.2)",
        "stages(quantised(fedavg, down=8):1, quantised(fedmr):2, sparse(fedper))",
        "stages(quantised(fedavg):auto, fedmr)",
        "quantised(stages(fedavg:auto, fedmr, patience=1), down=8)",
        "quantised(lowrank(scaffold, rank=1), bits=4, down=8)",
        "sparse(umf(scaffold), feedback=false)",
    ],
)
def test_codes_combine_with_other_methods(expression: str) -> None:
    trained = run_federation(expression)
    assert trained.history[-1]["accuracy"] > 0
    plain = 4 * task().layout.size
    assert trained.history[0]["bytes_up"] / len(trained.history[0]["clients"]) < plain


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("fedmr(local=quantised(fedavg))", r"local must be .* not quantised\(fedavg\)"),
        ("secure(quantised(fedmr))", "upload layers of other clients instead of updates"),
        ("quantised(secure(fedmr))", "upload layers of other clients instead of updates"),
        ("sparse(quantised(fedavg))", "already codes uploads. Only quantised can be around it"),
        ("sparse(sparse(fedavg))", "sparse is allowed only once"),
        ("quantised(stages(quantised(fedavg):1, fedmr))", "quantised is allowed only once"),
        ("quantised(fedavg, bits=3)", "bits must be"),
        ("sparse(fedavg, share=0)", "share must be"),
        ("lowrank(fedavg, rank=0)", "rank must be"),
    ],
)
def test_bad_expressions_are_refused(expression: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        build(expression)


@pytest.mark.parametrize(
    ("expression", "swapped"),
    [
        ("robust(quantised(fedavg, down=4))", "quantised(robust(fedavg), down=4)"),
        ("umf(sparse(fedavg, share=0.1))", "sparse(umf(fedavg), share=0.1)"),
        ("ala(sparse(fedavg, share=0.1))", "sparse(ala(fedavg), share=0.1)"),
        ("ala(lowrank(fedavg, rank=1))", "lowrank(ala(fedavg), rank=1)"),
        ("ala(quantised(fedmr, down=8))", "quantised(ala(fedmr), down=8)"),
        ("clustered(quantised(fedavg))", "quantised(clustered(fedavg))"),
    ],
)
def test_a_code_inside_another_part_equals_the_other_order(expression: str, swapped: str) -> None:
    """Replies are coded last and decoded first, in every order of the expression."""
    first, second = run_federation(expression), run_federation(swapped)
    assert first.history == second.history
    assert torch.equal(first.model(), second.model())
    memory, other = first.engine.memory(), second.engine.memory()
    assert memory.keys() == other.keys()
    assert all(torch.equal(memory[name], other[name]) for name in memory)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("quantised(fedfomo)", "fedfomo do not return an update of one received model"),
        ("lowrank(fedper)", "fedper do not return whole models"),
    ],
)
def test_methods_that_cannot_be_coded_are_refused(expression: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        federation(expression)


def test_coded_tensors_have_the_declared_names_and_types() -> None:
    code = Quantised(Sparse(FedAvg(), share=0.1))
    simulation = Federation(code, task(), RowsEngine(task()), Schedule(rounds=1))
    opening = simulation.pipeline.plan.opening()

    def types(pipeline: Pipeline) -> dict[str, torch.dtype | None]:
        specs = pipeline.expected(opening)
        assert specs.pop(INTEGERS).dtype == torch.int64
        return {name: spec.dtype for name, spec in specs.items()}

    number = task().layout.dtype
    expected = {"model.rest": number, "model.values.scales": number, "model.indices": torch.int32}
    assert types(simulation.pipeline) == {**expected, "model.values.levels": torch.uint8}
    sparse = {"model.rest": number, "model.values": number, "model.indices": torch.int32}
    assert types(simulation.pipeline.inside(code)) == sparse
