"""Objects are shown by a few lines at a prompt and in notebooks."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

import fedloom as fl
from fedloom.common.training import Training
from fedloom.reviews.checker.findings import Finding, Findings
from small_task import small_task


@pytest.fixture(scope="module")
def task() -> fl.Task:
    return fl.make_task(
        "digits", clients=20, partition="dirichlet(0.3)", label_noise="symmetric(0.4)"
    )


class Cells(HTMLParser):
    """Collects the texts of a table's cells."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_a_task_states_its_clients_samples_model_and_training(task: fl.Task) -> None:
    sizes = task.partition.sizes
    weights = sum(parameter.numel() for parameter in task.model.parameters())
    wrong = (task.train.labels != task.true_labels).sum()
    assert repr(task).splitlines() == [
        "Task",
        "  data: digits, judged by accuracy",
        f"  clients: 20 clients with {sizes.min()} to {sizes.max()} training samples, "
        f"{sizes.sum():,} in total",
        f"  test set: {len(task.test)} samples of [1, 8, 8]",
        f"  model: mlp, {weights:,} weights",
        "  training: learning_rate 0.01, epochs 1, batch_size 50",
        f"  wrong labels: {wrong} of {sizes.sum():,} training samples",
    ]


def test_data_are_shown_without_their_tensors(task: fl.Task) -> None:
    for described in (task.dataset, task.train, task.partition, small_task()):
        assert "tensor" not in repr(described)
        assert "array" not in repr(described)
        assert len(repr(described)) < 600


def test_long_lists_of_names_are_cut() -> None:
    names = [f"hospital {number}" for number in range(40)]
    samples = fl.Samples(torch.zeros(40, 2), torch.zeros(40, dtype=torch.int64), groups=names)
    assert "hospital 9" not in repr(samples)
    assert "(40 in total)" in repr(samples)


def test_training_shows_what_differs_from_the_defaults() -> None:
    training = Training(learning_rate=0.1, steps=3, momentum=0.9)
    shown = "Training(learning_rate=0.1, momentum=0.9, steps=3, batch_size=50)"
    assert repr(training) == shown
    assert eval(shown) == training
    assert eval(repr(Training())) == Training()


def test_a_notebook_shows_the_same_lines_as_a_table() -> None:
    samples = fl.Samples(torch.zeros(2, 2), ["<b>", "c"])
    parser = Cells()
    parser.feed(samples._repr_html_())
    assert parser.cells[-2:] == ["label names", "<b>, c"]


def test_findings_are_shown_line_by_line() -> None:
    assert repr(Findings()).startswith("Nothing to fix")
    findings = Findings([Finding("it draws", "a.py:3", "use a stream"), Finding("it keeps")])
    assert repr(findings) == "a.py:3: it draws: use a stream\nit keeps"
    assert findings == [Finding("it draws", "a.py:3", "use a stream"), Finding("it keeps")]
