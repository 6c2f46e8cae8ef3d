"""Objects as Python arguments: models, losses, training and partitions, and error messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.common.errors import FedloomError
from fedloom.data import DataSpec
from small_task import small_task


class Net(nn.Module):
    def __init__(self, spec: DataSpec, width: int = 8) -> None:
        super().__init__()
        self.hidden = nn.Linear(spec.shape[0], width)
        self.out = nn.Linear(width, spec.outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.relu(self.hidden(inputs)))
        return logits


class Unfit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()


def make(**options: Any) -> fl.Task:
    generator = torch.Generator().manual_seed(0)
    samples = fl.Samples(torch.randn(80, 4, generator=generator), torch.arange(80) % 4)
    return fl.make_task(
        (samples, samples), **{"clients": 4, "partition": "iid", "model": "logistic", **options}
    )


@pytest.mark.parametrize(
    "model", [Net, lambda spec: Net(spec), partial(Net, width=8), f"{__name__}:Net"]
)
def test_a_class_and_a_function_draw_the_weights_of_the_seed(model: Any) -> None:
    initial, repeated, of_another_seed = (
        make(model=model, seed=seed).initial for seed in (3, 3, 4)
    )
    assert torch.equal(initial, repeated)
    assert torch.equal(initial, make(model=f"{__name__}:Net(width=8)", seed=3).initial)
    assert not torch.equal(initial, of_another_seed)
    assert fl.run("fedavg", make(model=model), rounds=1, participation=1.0, quiet=True).history


def test_a_function_of_nothing_is_a_model_too() -> None:
    assert make(model=lambda: nn.Linear(4, 4)).initial.numel() == 20


def of_the_seed(labels: Any, clients: int, seed: int) -> list[Any]:
    return np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)


def test_partitions_of_ones_own_by_function_path_and_list(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [list(indices) for indices in of_the_seed(range(80), 4, 7)]
    monkeypatch.chdir(Path(__file__).parent)
    arrays = [np.array(indices) for indices in expected]
    for partition in (of_the_seed, f"{__name__}:of_the_seed", expected, arrays):
        task = make(partition=partition, seed=7)
        assert [list(task.partition[client]) for client in range(4)] == expected
    classes = make(partition=lambda labels: [np.flatnonzero(labels == k) for k in range(2)])
    assert classes.partition.sizes.tolist() == [20, 20]
    masks = make(partition=lambda labels: [labels == k for k in range(2)])
    assert masks.partition.indices.tolist() == classes.partition.indices.tolist()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"model": Unfit},
            r"model Unfit: .*missing .*'width' \(give Unfit\(...\) itself, or a function\)",
        ),
        ({"model": lambda: 3}, "model <lambda> must return a torch.nn.Module, not int"),
        ({"model": lambda wide: wide}, "model <lambda>: .*missing .*'wide'"),
        (
            {"model": None},
            "model must be a name, a torch.nn.Module or a function that returns one, not None",
        ),
        (
            {"objective": nn.CrossEntropyLoss},
            "a name, 'module:function' or a function, not the class CrossEntropyLoss",
        ),
        ({"objective": 3}, "a name, 'module:function' or a function, not 3"),
        ({"training": {"lr": 0.1}}, "training has no parameter 'lr': did you mean 'learning_rate'"),
        ({"training": {"bs": 10}}, "did you mean 'batch_size'"),
        ({"training": {"local_epochs": 10}}, "did you mean 'epochs'"),
        ({"training": {"learning_rat": 1}}, "did you mean 'learning_rate'"),
        ({"training": 0.1}, "training must be a Training or a dictionary of its fields, not 0.1"),
        ({"partition": "irid"}, "did you mean 'iid'"),
        (
            {"partition": 4},
            r"a name, a function or each client's sample indices, such as \[\[0, 2\], \[1, 3\]\]",
        ),
        ({"partition": f"{__name__}:of_the_sed"}, "did you mean 'of_the_seed'"),
        ({"partition": [[0, 1], [80]]}, "holds sample 80, but the data end at sample 79"),
        ({"partition": [[0, 1], [1]]}, "holds sample 1 2 times"),
    ],
)
def test_a_mistake_in_a_task_is_told_in_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(FedloomError, match=text) as caught:
        make(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("start", [fl.run, fl.compare])
@pytest.mark.parametrize("stop", [20, "accuracy", [20]])
def test_a_wrong_stop_is_told_in_one_line(start: Callable[..., Any], stop: Any) -> None:
    with pytest.raises(
        FedloomError, match=r"stop must be (a Stop, such as fl.Stop\(20\)|a table with the keys)"
    ) as caught:
        start("fedavg", small_task(), rounds=2, stop=stop, quiet=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("start", [fl.run, fl.compare])
def test_a_misspelt_figure_of_stop_is_told(start: Callable[..., Any]) -> None:
    with pytest.raises(
        FedloomError, match=r"stop.metric 'acuracy' is not allowed: did you mean 'accuracy'"
    ):
        start("fedavg", small_task(), rounds=2, stop=fl.Stop(2, metric="acuracy"), quiet=True)


def test_a_loss_of_a_batch_says_what_to_change() -> None:
    with pytest.raises(
        FedloomError, match=r"the loss of each sample, \[b\], not \[\] .*reduction='none'"
    ):
        fl.run(
            "fedavg", make(objective=lambda outputs, targets: outputs.mean()), rounds=1, quiet=True
        )
