"""Recordings of full models, compared with plain loops.

Similarity, local models compared with the global model, and landscape.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fedloom as fl
from fedloom.algorithm.records import Replies
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedmr import FedMR
from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.flat.layout import Layout
from fedloom.recording.landscape import Landscape, filter_normalised, gaussian
from fedloom.recording.recorder import build_recorders
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from recording_support import run_recorded
from small_task import small_task


class Watched:
    """Stores the uploads by slot and the final state of each round."""

    def setup(self, plan: Any) -> None:
        super().setup(plan)  # type: ignore[misc]
        self.uploaded: list[dict[int, Tensor]] = []
        self.left: list[dict[str, Tensor]] = []

    def receive(self: Any, round: Round, replies: Replies) -> None:
        self.uploaded.append(
            dict(zip(replies.slots.tolist(), replies["model"].clone(), strict=True))
        )
        super().receive(round, replies)  # type: ignore[misc]
        self.left.append(
            {"model": self.model().clone(), **{k: t.clone() for k, t in self.state.items()}}
        )


class WatchedAvg(Watched, FedAvg):
    pass


class WatchedMR(Watched, FedMR):
    pass


def naive_cosine(rows: list[Tensor]) -> float:
    """Return the mean cosine over all pairs in plain Python."""
    cosines = []
    for a, b in itertools.combinations([row.tolist() for row in rows], 2):
        product = math.fsum(x * y for x, y in zip(a, b, strict=True))
        cosines.append(
            product / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))
        )
    return sum(cosines) / len(cosines)


def naive_score(
    task: Task, row: Tensor, indices: list[int], test: bool = False
) -> tuple[float, float]:
    """Return accuracy and loss on the samples at these indices, one sample at a time."""
    module, samples = task.module(row).eval(), task.test if test else task.train
    hits, losses = 0, []
    for index in indices:
        with torch.no_grad():
            logits = module(samples.inputs[index].unsqueeze(0))
        hits += int(logits.argmax()) == int(samples.labels[index])
        losses.append(float(F.cross_entropy(logits, samples.labels[index].unsqueeze(0))))
    return hits / len(losses), sum(losses) / len(losses)


@pytest.mark.parametrize("method", [WatchedAvg(), WatchedMR()])
def test_similarity_is_the_mean_over_pairs(method: Any) -> None:
    task = small_task()
    schedule = Schedule(rounds=6, participation=0.7, seed=1, dropout=0.3)
    _, recording = run_recorded(method, task, schedule, "similarity(every=2)")
    similarity, trained = recording["similarity"], task.layout.trainable
    assert similarity["rounds"] == [
        number for number in (2, 4, 6) if len(method.uploaded[number - 1]) > 1
    ]
    for index, number in enumerate(similarity["rounds"]):
        rows = [row[:trained] for row in method.uploaded[number - 1].values()]
        assert similarity["uploaded"][index] == pytest.approx(naive_cosine(rows), abs=1e-5)
        if isinstance(method, WatchedMR):
            pool = [row[:trained] for row in method.left[number - 1]["pool"]]
            assert similarity["pool"][index] == pytest.approx(naive_cosine(pool), abs=1e-5)
    assert ("pool" in similarity) is isinstance(method, WatchedMR)
    assert similarity["uploaded"][0] < 0.9999


def test_a_round_with_a_single_reply_has_no_similarity() -> None:
    _, recording = run_recorded(
        FedAvg(), small_task(), Schedule(rounds=2, participation=0.1), "similarity"
    )
    assert recording == {}


def test_two_stages_have_a_pool_only_where_one_is_kept() -> None:
    result = fl.run(
        "stages(fedavg:2, fedmr)", small_task(), rounds=4, participation=0.5, record=["similarity"]
    )
    assert [value is None for value in result.recorded[0]["pool"]] == [True, False, False, False]


@pytest.mark.parametrize("method", [WatchedAvg(), WatchedMR()])
def test_local_models_and_their_aggregate_are_scored_on_the_test_set(method: Any) -> None:
    task = small_task()
    schedule = Schedule(rounds=4, participation=0.7, seed=1, dropout=0.3, evaluate_every=1)
    federation, recording = run_recorded(method, task, schedule, "aggregate(every=2, models=3)")
    aggregate, every = recording["aggregate"], list(range(len(task.test)))
    assert aggregate["rounds"] == [2, 4]
    assert set(aggregate["slots"]) <= {0, 1, 2}
    for index, number in enumerate(aggregate["rounds"]):
        for k, slot in enumerate(aggregate["slots"]):
            row = method.uploaded[number - 1].get(slot)
            measured = (
                aggregate["models"]["accuracy"][k][index],
                aggregate["models"]["loss"][k][index],
            )
            if row is None:
                assert measured == (None, None)
            else:
                assert measured == pytest.approx(naive_score(task, row, every, test=True), rel=1e-5)
        figures = federation.history[number - 1]
        assert aggregate["global"]["accuracy"][index] == figures["accuracy"]
        assert aggregate["global"]["loss"][index] == figures["loss"]


def naive_normalised(direction: Tensor, model: Tensor, layout: Layout) -> list[float]:
    """Scale the direction to the model's norm for each filter, in plain Python."""
    result = [0.0] * layout.size
    for entry in layout.slices:
        if entry.stop > layout.trainable or len(entry.shape) < 2:
            continue
        width = (entry.stop - entry.start) // entry.shape[0]
        for start in range(entry.start, entry.stop, width):
            norm = math.sqrt(sum(float(model[k]) ** 2 for k in range(start, start + width)))
            drawn = math.sqrt(sum(float(direction[k]) ** 2 for k in range(start, start + width)))
            for k in range(start, start + width):
                result[k] = float(direction[k]) * norm / drawn
    return result


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_directions_are_normalised_filter_by_filter(
    into: int, out: int, kernel: int, seed: int
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layout = Layout(
            module := nn.Sequential(
                nn.Conv2d(into, out, kernel), nn.BatchNorm2d(out), nn.Linear(out, 2)
            )
        )
    model, direction = layout.flatten(module), gaussian(layout, seed, "first")
    scaled = filter_normalised(direction, model, layout)
    assert scaled.tolist() == pytest.approx(
        naive_normalised(direction, model, layout), rel=1e-5, abs=1e-7
    )
    assert torch.equal(gaussian(layout, seed, "first"), direction)
    assert not torch.equal(gaussian(layout, seed, "second"), direction)


@pytest.mark.parametrize("data", ["train", "test"])
def test_the_landscape_is_the_loss_around_the_final_model(data: str) -> None:
    task, schedule = small_task(), Schedule(rounds=3, participation=0.7, seed=1)
    text = f"landscape(grid=5, radius=0.5, samples=11, data={data}, directions=4)"
    federation, recording = run_recorded(FedMR(), task, schedule, text)
    landscape, model, layout = recording["landscape"], federation.model(), task.layout
    pool = (
        sorted(task.partition.indices.tolist()) if data == "train" else list(range(len(task.test)))
    )
    chosen = [pool[round(k * (len(pool) - 1) / 10)] for k in range(11)]
    accuracy, loss = naive_score(task, model, chosen, data == "test")
    assert (landscape["samples"], landscape["data"]) == (11, data)
    assert landscape["accuracy"] == pytest.approx(accuracy)
    assert landscape["loss"] == pytest.approx(loss, rel=1e-5)
    # the center is the model itself
    assert landscape["surface"][2][2] == pytest.approx(loss, rel=1e-5)
    assert landscape["x"] == landscape["y"] == [-0.5, -0.25, 0.0, 0.25, 0.5]
    x_axis, y_axis = (
        torch.tensor(naive_normalised(gaussian(layout, 4, axis), model, layout))
        for axis in ("first", "second")
    )
    for i, j in ((0, 0), (0, 4), (3, 1), (4, 2)):
        row = model + landscape["x"][j] * x_axis + landscape["y"][i] * y_axis
        assert landscape["surface"][i][j] == pytest.approx(
            naive_score(task, row, chosen, data == "test")[1], rel=1e-4
        )


def test_the_landscape_can_be_computed_later_from_the_saved_model(tmp_path: Path) -> None:
    task = small_task()
    result = fl.run("fedmr", task, rounds=2, directory=tmp_path, record=["landscape(grid=3)"])
    federation = result.federation
    recomputed = Landscape(grid=3).around(federation.model(), task, federation.integers)
    assert recomputed == json.loads((tmp_path / "recording.json").read_text())[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("similarity(every=0)", "similarity: every must be at least 1, not 0"),
        ("aggregate(models=0)", "aggregate: models must be at least 1, not 0"),
        ("landscape(grid=2)", "grid must be at least 3, not 2"),
        ("landscape(grid=4)", "grid must be odd, so that the model is a point of it, not 4"),
        (
            "landscape(radius=0)",
            "landscape: radius must be greater than 0 and at most 3.4e+38, not 0",
        ),
        (
            "landscape(data=tests)",
            "landscape: data must be 'train' or 'test', not 'tests': did you mean 'test'?",
        ),
    ],
)
def test_bad_recorders_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        build_recorders([text])
    assert str(refused.value) == message
