"""Validation data: a part of the clients' training samples that stands in for all test data while choices are made."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fedloom.data.partition import split_train_test
from fedloom.errors import InvalidValue
from fedloom.randomness import stream_seed
from fedloom.task import Task


def withhold(task: Task, share: float, seed: int) -> Task:
    """Return the task with `share` of each client's training samples held out, in place of all its test data.

    Of a client's n training samples floor((1 - share) n) go on training, but at least one, and at most n - 1 where n >= 2.
    The global test set becomes the union of all clients' held-out samples; where clients had test samples, each tests on its
    own held-out ones. Nothing computed on the new task depends on the task's test data. The samples are drawn by the stream
    (seed, "validation split"), as `split_train_test` draws: a client's own samples decide. Like all test data, they have their
    true labels where the training samples have label noise.
    Raises `InvalidValue` unless 0 < share < 1, and where every client has a single sample.
    """
    training, validation = split_train_test(task.partition, stream_seed(seed, "validation split"), share)
    if not len(validation.indices):
        raise InvalidValue("no client has two training samples, so none can be held out for validation")
    index = torch.from_numpy(np.sort(validation.indices)).to(task.train.labels.device)
    local_test = None if task.local_test is None else validation
    train = task.train
    if task.true_labels is not None:
        labels = train.labels.clone()
        labels[index] = task.true_labels[index]
        train = dataclasses.replace(train, labels=labels)
    return dataclasses.replace(task, train=train, test=train[index], partition=training, local_test=local_test)
