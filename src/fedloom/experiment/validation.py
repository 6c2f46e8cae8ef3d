"""Validation data: a part of the clients' training samples that stands in for all test data while choices are made."""

import dataclasses

import numpy as np
import torch

from fedloom.data.partition import split_train_test
from fedloom.errors import InvalidValue
from fedloom.randomness import stream_seed
from fedloom.task import Task


def withhold(task: Task, share: float, seed: int) -> Task:
    """Return the task with `share` of each client's training samples held out, in place of all its test data.

    Each client keeps at least one sample to train on, and tests on its own held-out ones where it had test samples. These have
    their true labels. Raises `InvalidValue` unless 0 < share < 1, and where every client has a single sample.
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
