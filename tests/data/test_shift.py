"""Distribution shift of the clients' inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.data.partition import Partition
from fedloom.data.shift import Rotation, shifts

CLIENTS = 6


def shifted(expression: str, inputs: Tensor, seed: int = 0, clients: int = CLIENTS) -> Tensor:
    shift = shifts.build_unless_none(expression)
    assert shift is not None
    partition = Partition.of(np.array_split(np.arange(len(inputs)), clients))
    return shift.apply(
        fl.Samples(inputs, torch.zeros(len(inputs), dtype=torch.int64)), partition, seed
    ).inputs


def pictures(count: int = 12, side: int = 8) -> Tensor:
    return torch.randint(
        0,
        256,
        (count, 3, side, side),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )


@pytest.mark.parametrize(
    "expression", ["rotation(0)", "rotation([0, 360])", "noise(0)", "colour(0)"]
)
def test_nothing_changes_at_zero(expression: str) -> None:
    assert torch.equal(shifted(expression, pictures()), pictures())


@pytest.mark.parametrize(
    "expression", ["rotation(45)", "rotation([0, 90, 180])", "noise(0.2)", "colour(0.5)"]
)
def test_a_shift_is_drawn_from_the_seed_and_the_client_alone(expression: str) -> None:
    inputs = pictures()
    expected = shifted(expression, inputs, 3)
    assert torch.equal(expected, shifted(expression, inputs, 3))
    assert not torch.equal(expected, shifted(expression, inputs, 4))
    shift = shifts.build_unless_none(expression)
    assert shift is not None
    mixed = Partition.of([rows[::-1] for rows in np.array_split(np.arange(12), CLIENTS)])
    samples = fl.Samples(inputs, torch.zeros(12, dtype=torch.int64))
    # for any order of a client's samples
    assert torch.equal(shift.apply(samples, mixed, 3).inputs, expected)
    assert torch.equal(samples.inputs, pictures())  # a copy is changed
    partition = Partition.of([np.arange(4)])
    # samples without a client are unchanged
    assert torch.equal(shift.apply(samples, partition, 3).inputs[4:], inputs[4:])


def test_right_angles_are_exact_and_evenly_distributed() -> None:
    angles = [0.0, 90.0, 180.0, 270.0]
    drawn = [Rotation(angles).angle(client, 10, 0) for client in range(10)]
    assert sorted(map(drawn.count, angles)) == [2, 2, 3, 3]
    inputs = pictures(side=5)
    shifted_inputs = shifted("rotation([90])", inputs)
    assert torch.equal(shifted_inputs, inputs.rot90(1, (2, 3)))


def test_other_angles_turn_about_the_centre() -> None:
    """A bright spot right of the centre is above it after nearly 90 degrees, half-way at 45."""
    spot = torch.zeros(1, 1, 21, 21)
    spot[0, 0, 10, 18] = 1
    for degrees in (30.0, 45.0, 89.0):
        turned = Rotation([degrees]).changed(spot, 0, 1, 0)[0, 0]
        total = turned.sum()
        row, column = ((turned.sum(side) * torch.arange(21)).sum() / total for side in (1, 0))
        assert float(row) == pytest.approx(10 - 8 * math.sin(math.radians(degrees)), abs=0.1)
        assert float(column) == pytest.approx(10 + 8 * math.cos(math.radians(degrees)), abs=0.1)
    drawn = np.array([Rotation(30.0).angle(client, 200, 0) for client in range(200)])
    assert (np.abs(drawn) <= 30).all()
    assert drawn.std() == pytest.approx(30 / math.sqrt(3), rel=0.1)


def test_noise_grows_from_client_to_client() -> None:
    inputs = torch.zeros(40_000, 3)
    shifted_inputs = shifted("noise(0.4)", inputs, clients=4).view(4, -1)
    for client in range(4):
        assert float(shifted_inputs[client].var()) == pytest.approx(
            0.4 * (client + 1) / 4, rel=0.05
        )


def test_colour_is_a_gain_and_an_offset_of_each_channel() -> None:
    inputs = torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    shifted_inputs = shifted("colour(0.4)", inputs).view(CLIENTS, 2, 3, 16)
    inputs = inputs.view(CLIENTS, 2, 3, 16)
    for client in range(CLIENTS):
        for channel in range(3):
            x, y = (
                inputs[client, :, channel].flatten(),
                shifted_inputs[client, :, channel].flatten(),
            )
            gain, offset = np.polyfit(x.numpy(), y.numpy(), 1)
            assert np.allclose(gain * x + offset, y, atol=1e-4)
            assert 0.6 - 1e-4 <= gain <= 1.4 + 1e-4
            assert abs(offset) <= 0.2 + 1e-4


def test_clients_train_and_test_on_shifted_inputs_and_the_global_test_set_stays() -> None:
    options: dict[str, Any] = {
        "clients": 4,
        "partition": "iid",
        "model": "logistic",
        "local_test": 0.25,
    }
    plain, turned = (
        fl.make_task("digits", shift=shift, **options) for shift in ("none", "rotation([90])")
    )
    assert torch.equal(turned.train.inputs, plain.train.inputs.rot90(1, (2, 3)))
    assert torch.equal(turned.test.inputs, plain.test.inputs)
    assert np.array_equal(turned.partition.indices, plain.partition.indices)
    merged = fl.make_task("digits", shift="rotation([90])", merge=True, **options)
    assert merged.local_test is not None
    assert torch.equal(
        merged.test.inputs,
        merged.train.inputs[torch.from_numpy(np.sort(merged.local_test.indices))],
    )


@pytest.mark.parametrize(
    ("expression", "inputs", "text"),
    [
        ("rotatoin(3)", pictures(), "did you mean 'rotation'?"),
        ("rotation(400)", pictures(), "degrees must be between -360 and 360"),
        ("rotation([])", pictures(), "degrees must list an angle"),
        ("noise(-1)", pictures(), "sigma must be at least 0"),
        ("colour(2)", pictures(), "strength must be between 0 and 1"),
        (
            "rotation(3)",
            torch.zeros(6, 4),
            "this shift needs pictures [n, channels, height, width], not [6, 4]",
        ),
        (
            "noise(1)",
            torch.zeros(6, 4, dtype=torch.int64),
            "shift needs pictures or numbers, not [6, 4] of int64",
        ),
    ],
)
def test_shifts_that_do_not_fit_are_refused_in_one_line(
    expression: str, inputs: Tensor, text: str
) -> None:
    with pytest.raises(FedloomError) as caught:
        shifted(expression, inputs)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_make_task_refuses_a_shift_that_does_not_fit() -> None:
    with pytest.raises(InvalidValue, match="needs pictures"):
        fl.make_task("wine", clients=3, partition="iid", model="logistic", shift="colour(0.1)")
