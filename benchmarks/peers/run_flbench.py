"""FL-bench: its servers and clients of FedAvg and FedALA, one client after another, without
evaluation.

`--source` is the folder of a clone. Empty modules replace torchvision, Ray, Hydra and pynvml, which
these parts import but do not need here. FL-bench trains all clients with one client object, so that
all clients of its FedALA share one set of blending weights and one earlier model.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch_models
import workload as w
from omegaconf import OmegaConf
from torch import nn

for absent in (
    *("torchvision", "torchvision.datasets", "torchvision.io", "torchvision.io.image"),
    *("torchvision.models", "torchvision.transforms", "ray", "ray.actor", "pynvml"),
    *("hydra", "hydra.core", "hydra.core.hydra_config"),
):
    sys.modules[absent] = MagicMock()


def settings(arguments: Any, work: w.Workload) -> Any:
    """Return FL-bench's settings: its defaults with those of the workload."""
    own = {
        "method": arguments.method,
        "dataset": {"name": "made", "split": "sample"},
        "model": {"name": "made"},
        "optimizer": {"name": "sgd", "lr": work.learning_rate, "momentum": work.momentum},
        "common": {
            "join_ratio": work.cohort / work.users,
            "global_epoch": arguments.warm_up + arguments.rounds,
            "local_epoch": 1,
            "batch_size": work.batch,
            "client_side_evaluation": False,
            "test": {"client": {"interval": -1}},
            "verbose_gap": 10**6,
            "use_cuda": False,
            "save_log": False,
            "save_metrics": False,
            "save_learning_curve_plot": False,
        },
        "fedala": {
            "layer_idx": 2,
            "num_pre_loss": 10,
            "eta": 1.0,
            "threshold": 0.1,
            "rand_percent": 0.8,
        },
    }
    return OmegaConf.merge(OmegaConf.load(arguments.source / "config" / "defaults.yaml"), own)


def write_partition(folder: Path, work: w.Workload) -> None:
    """Write the files that FL-bench reads: each client has its own samples for training."""
    clients = list(range(work.users))
    data = folder / "data" / "made"
    data.mkdir(parents=True)
    (data / "args.json").write_text(json.dumps({}))
    indices = [
        {"train": list(range(k * work.samples, (k + 1) * work.samples)), "val": [], "test": []}
        for k in clients
    ]
    separation = {"train": clients, "val": clients, "test": clients, "total": work.users}
    partition = {"separation": separation, "data_indices": indices}
    (data / "partition.pkl").write_bytes(pickle.dumps(partition))


def main() -> None:
    arguments = w.arguments(__doc__ or "")
    torch.set_num_threads(arguments.cores)
    sys.path.insert(0, str(arguments.source))
    fedavg = importlib.import_module("src.server.fedavg")
    models = importlib.import_module("src.utils.models")
    datasets = importlib.import_module("data.utils.datasets")
    work = w.WORKLOADS[arguments.workload]
    data = work.data()
    layers = torch_models.model(arguments.workload)

    class Model(models.DecoupledModel):  # type: ignore[misc,name-defined]
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.base = nn.Sequential(*list(layers)[:-1])
            self.classifier = layers[-1]

    class Data(datasets.BaseDataset):  # type: ignore[misc,name-defined]
        def _rescale_data(self) -> None:
            pass  # the samples are no images of 0 to 255

    module = importlib.import_module(f"src.server.{arguments.method}")
    base = module.FedAvgServer if arguments.method == "fedavg" else module.FedALAServer
    ends: list[float] = []

    class Server(base):  # type: ignore[misc,valid-type]
        def get_dataset(self) -> Data:
            inputs, labels = (torch.from_numpy(array).flatten(0, 1) for array in data)
            return Data(inputs, labels, list(range(10)))

        def display_metrics(self) -> None:
            ends.append(w.clock())

    fedavg.MODELS["made"] = Model
    with tempfile.TemporaryDirectory() as folder:
        write_partition(Path(folder), work)
        fedavg.FLBENCH_ROOT = Path(folder)
        fedavg.HydraConfig.get().runtime.output_dir = folder
        began = w.clock()
        server = Server(args=settings(arguments, work))
        server.train()
    server.model.load_state_dict(server.public_model_params, strict=False)
    probe = (torch.from_numpy(array) for array in work.probe(data))
    loss = torch_models.loss_of(server.model, *probe)
    w.tell("FL-bench", ends, began, arguments.warm_up, loss)


if __name__ == "__main__":
    main()
