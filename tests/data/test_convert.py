"""Conversion of user data: all numeric types, labels as text or from 1, and error messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.common.errors import InvalidValue
from fedloom.data.convert import as_labels

FEATURES = np.random.default_rng(0).normal(size=(12, 3))
NAMES = ["cat", "ant", "bee"] * 4


@pytest.mark.parametrize(
    ("inputs", "dtype"),
    [
        (FEATURES, torch.float32),
        (FEATURES.astype(np.float16), torch.float32),
        (FEATURES > 0, torch.float32),
        (FEATURES.tolist(), torch.float32),
        ([torch.ones(2), torch.zeros(2)] * 6, torch.float32),
        (np.ones((12, 3), np.int32), torch.int64),
        (np.ones((12, 8, 8), np.uint8), torch.uint8),
        (torch.ones(12, 3, dtype=torch.float64), torch.float64),  # a model of this type may need it
    ],
)
def test_inputs_may_be_of_any_type_of_number(inputs: Any, dtype: torch.dtype) -> None:
    samples = fl.Samples(inputs, np.arange(12))
    assert (samples.inputs.dtype, len(samples)) == (dtype, 12)
    if dtype == torch.uint8:
        assert samples.inputs.shape == (12, 1, 8, 8)


def test_labels_of_text_keep_their_names_and_mean_the_same_in_both_parts() -> None:
    test = fl.Samples(FEATURES[:3], ["dog", "cat", "bee"], ["b", "d", "a"])
    dataset = fl.Dataset("pets", fl.Samples(FEATURES, NAMES, np.array(["a", "b", "c"] * 4)), test)
    assert (dataset.classes, dataset.class_names) == (4, ("ant", "bee", "cat", "dog"))
    assert dataset.train.labels[:3].tolist() == [2, 0, 1]
    assert dataset.test.labels.tolist() == [3, 2, 1]
    assert dataset.train.groups is not None
    assert dataset.test.groups is not None
    assert (dataset.train.groups[:3].tolist(), dataset.test.groups.tolist()) == (
        [0, 1, 2],
        [1, 3, 0],
    )
    both = dataset.train.concatenate(dataset.test)
    assert both.groups is not None
    assert both.groups[-3:].tolist() == [1, 3, 0]


def test_splits_with_different_class_names_are_joined_under_all_names() -> None:
    joined = fl.Samples(FEATURES[:2], ["b", "a"]).concatenate(fl.Samples(FEATURES[:2], ["c", "b"]))
    assert (joined.labels.tolist(), joined.label_names) == ([1, 0, 2, 1], ("a", "b", "c"))


@pytest.mark.parametrize(
    ("labels", "numbered", "names"),
    [
        (np.array([1, 2, 3], np.int32), [0, 1, 2], ("1", "2", "3")),
        (torch.tensor([-1, 1, 1], dtype=torch.int16), [0, 1, 1], ("-1", "1")),
        ([True, False, True], [1, 0, 1], ("False", "True")),
        (np.array([0, 2, 2], np.uint8), [0, 2, 2], None),  # a class without samples
    ],
)
def test_labels_that_do_not_begin_at_0_are_renumbered(
    labels: Any, numbered: Any, names: Any
) -> None:
    samples = fl.Samples(FEATURES[:3], labels)
    dataset = fl.Dataset("numbers", samples, samples)
    assert dataset.train.labels.tolist() == dataset.test.labels.tolist() == numbered
    assert (dataset.class_names, dataset.classes) == (names, max(numbered) + 1)


def test_a_task_of_lists_and_float64_trains() -> None:
    train = fl.Samples(torch.from_numpy(FEATURES), NAMES)
    task = fl.make_task(
        fl.Dataset("pets", train, train), clients=2, partition="iid", model="logistic"
    )
    assert fl.run("fedavg", task, rounds=1).history
    double = fl.make_task(task.dataset, clients=2, partition="iid", model=nn.Linear(3, 3).double())
    assert double.train.inputs.dtype == torch.float64


def dataset(labels: Any = NAMES, inputs: Any = FEATURES, **options: Any) -> fl.Dataset:
    samples = fl.Samples(inputs, labels)
    return fl.Dataset("pets", samples, samples, **options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fl.Samples([[1.0], [1.0, 2.0]], [0, 1]), "inputs are no array"),
        (
            lambda: fl.Samples(np.full((2, 2), np.nan), [0, 1]),
            "inputs hold a NaN or infinity in row 0: fill it in",
        ),
        (
            lambda: fl.Samples([["a"], ["b"]], [0, 1]),
            "inputs are text, such as 'a': give numbers, or a table",
        ),
        (
            lambda: fl.Samples(np.zeros((2, 8, 9, 3), np.uint8), [0, 1]),
            "give inputs.transpose(0, 3, 1, 2)",
        ),
        (
            lambda: fl.Samples(FEATURES, NAMES[:5]),
            "12 inputs but 5 labels: give one for each sample",
        ),
        (
            lambda: fl.Samples(FEATURES, [*NAMES[:11], None]),
            "labels hold None in row 11: give numbers or text",
        ),
        (
            lambda: fl.Samples(FEATURES, np.array([1 + 2j] * 12)),
            "labels are complex128: give whole numbers",
        ),
        (lambda: fl.Samples(FEATURES, 3), "labels must be an array, a list or a tensor, not int"),
        (
            lambda: fl.Samples(FEATURES, NAMES, [0.5] * 12),
            "groups are floats: give whole numbers or text",
        ),
        (
            lambda: fl.Samples(FEATURES, NAMES, [[0]] * 12),
            "groups are one client for each sample, [n], not of shape",
        ),
        (lambda: dataset(np.ones(12)), "give integers or text, or set objective='regression'"),
        (
            lambda: dataset(np.ones((12, 3), int)),
            "give labels.argmax(1), or set objective='multilabel'",
        ),
        (
            lambda: dataset(np.arange(12), classes=10),
            "labels must be 0 to 9, and 11 is among them: without classes",
        ),
        (
            lambda: dataset(class_names=("ant", "bee", "cot")),
            "'cat' is none of the 3 names: did you mean 'cot'?",
        ),
        (
            lambda: fl.Dataset("two", fl.Samples(FEATURES, NAMES), fl.Samples(FEATURES, range(12))),
            "labels are text in one part of the data and numbers in another",
        ),
        (
            lambda: fl.Dataset(
                "two", fl.Samples(FEATURES, NAMES), fl.Samples(FEATURES[:, :2], NAMES)
            ),
            "inputs for training are [3] torch.float32, those for testing [2] torch.float32: "
            "give both alike",
        ),
        (
            lambda: fl.make_task(
                dataset(inputs=torch.full((12, 3), torch.inf)), clients=2, partition="iid"
            ),
            "inputs hold a NaN or infinity in row 0",
        ),
    ],
)
def test_each_error_names_the_field_and_the_remedy(make: Any, text: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        make()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_samples_are_no_error() -> None:
    assert len(fl.Samples(np.zeros((0, 3)), np.zeros(0, int))) == 0


def test_text_labels_of_any_array_are_numbered_alphabetically() -> None:
    for labels in (np.array(NAMES), np.array(NAMES, object), np.array(NAMES, "S")):
        numbers, names = as_labels(labels)
        assert names == ("ant", "bee", "cat")
        assert numbers[:3].tolist() == [2, 0, 1]
