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
    """The task with `share` of each client's training samples held out, and with these in the place of its test data.

    Of a client's n training samples floor((1 - share) n) go on training, but at least one, and at most n - 1 where n >= 2.
    The global test set becomes the union of all clients' held-out samples; where clients tested on samples of their own, each
    tests on its own held-out ones. The task's test data are left out: nothing computed on the new task depends on them. The
    samples are drawn by the stream (seed, "validation split"), as `split_train_test` draws: a client's own samples decide. Like
    all test data, they have their true labels where the training samples have label noise.
    Raises `InvalidValue` unless 0 < share < 1, and where every client has a single sample.
    """
    training, held = split_train_test(task.partition, stream_seed(seed, "validation split"), share)
    if not len(held.indices):
        raise InvalidValue("no client has two training samples, so none can be held out for validation")
    index = torch.from_numpy(np.sort(held.indices)).to(task.train.labels.device)
    own = None if task.local_test is None else held
    train = task.train
    if task.true_labels is not None:
        labels = train.labels.clone()
        labels[index] = task.true_labels[index]
        train = dataclasses.replace(train, labels=labels)
    return dataclasses.replace(task, train=train, test=train[index], partition=training, local_test=own)
