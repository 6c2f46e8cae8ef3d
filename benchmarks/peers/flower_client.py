"""Flower's client, in a separate module for the import by its actors."""

from __future__ import annotations

import functools
import os

import torch
import torch_models
import workload as w
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional as F

NAME = os.environ.get("PEERS_WORKLOAD", "mlp")


@functools.cache
def users() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cached value of each actor, so that no round computes it twice."""
    inputs, labels = w.WORKLOADS[NAME].data()
    return torch.from_numpy(inputs), torch.from_numpy(labels)


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    work = w.WORKLOADS[NAME]
    torch.set_num_threads(1)
    user = int(context.node_config["partition-id"])
    inputs, labels = (array[user] for array in users())
    module = torch_models.MODELS[NAME]()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=work.learning_rate, momentum=work.momentum)
    order = torch.randperm(work.samples)
    for start in range(0, work.samples, work.batch):
        chosen = order[start : start + work.batch]
        optimizer.zero_grad()
        F.cross_entropy(module(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": work.samples}),
    }
    return Message(content=RecordDict(content), reply_to=message)
