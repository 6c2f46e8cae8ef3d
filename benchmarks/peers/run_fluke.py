"""fluke: its FedAVG with clients that hold their tensors in memory, without evaluation.

Empty modules replace torchvision, because its builds do not import beside every build of torch.
fluke takes data sets and models from it, which this benchmark does not use.
"""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

for absent in ("", ".datasets", ".models", ".transforms", ".transforms.functional"):
    sys.modules[f"torchvision{absent}"] = MagicMock()

import torch
import torch_models
import workload as w
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.utils import FederationObserver


class Clock(FederationObserver):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def end_round(self, round: int) -> None:
        self.ends.append(w.clock())


def main() -> None:
    arguments = w.arguments(__doc__ or "")
    torch.set_num_threads(arguments.cores)
    work = w.WORKLOADS[arguments.workload]
    data = work.data()
    inputs, labels = (torch.from_numpy(array) for array in data)
    clients = [
        FastDataLoader(
            inputs[user], labels[user], num_labels=10, batch_size=work.batch, shuffle=True
        )
        for user in range(work.users)
    ]
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    settings = DDict(
        client=DDict(
            batch_size=work.batch,
            local_epochs=1,
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=work.learning_rate, momentum=work.momentum),
            scheduler=DDict(name="StepLR", step_size=10**6, gamma=1.0),
        ),
        server=DDict(weighted=True),
        model=torch_models.model(arguments.workload),
    )
    container = DummyDataContainer(clients, [None] * work.users, None, 10)
    algorithm = FedAVG(work.users, DataSplitter(container), settings)
    clock = Clock()
    algorithm.set_callbacks(clock)
    began = w.clock()
    algorithm.run(arguments.warm_up + arguments.rounds, work.cohort / work.users, finalize=False)
    probe = (torch.from_numpy(array) for array in work.probe(data))
    w.tell(
        "fluke",
        clock.ends,
        began,
        arguments.warm_up,
        torch_models.loss_of(algorithm.server.model, *probe),
    )


if __name__ == "__main__":
    main()
