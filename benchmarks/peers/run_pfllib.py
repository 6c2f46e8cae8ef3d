"""PFLlib: its servers and clients of FedAvg and FedALA, without evaluation and files.

`--source` is the folder of a clone. Clients read their samples from memory, so that reading files
does not count. In FedALA, all clients learn their weights in every round, whether they train or
not. Modules that these parts import but do not use are replaced by empty ones if they are absent.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch_models
import workload as w

for name in ("h5py", "sklearn", "sklearn.preprocessing", "matplotlib", "matplotlib.pyplot"):
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = MagicMock()

OFF = {
    **{"few_shot": 0, "client_drop_rate": 0, "train_slow_rate": 0, "send_slow_rate": 0},
    **{"num_new_clients": 0, "fine_tuning_epoch_new": 0, "random_join_ratio": False},
    **{"learning_rate_decay": False, "time_select": False, "dlg_eval": False, "auto_break": False},
}
"""Options of PFLlib that are not used."""


def main() -> None:
    arguments = w.arguments(__doc__ or "")
    torch.set_num_threads(arguments.cores)
    sys.path.insert(0, str(arguments.source / "system"))
    work = w.WORKLOADS[arguments.workload]
    data = work.data()
    inputs, labels = (torch.from_numpy(array) for array in data)

    def read(dataset: str, client: int, **_: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(inputs[client], labels[client], strict=True))

    for part in ("servers.serverbase", "clients.clientbase", "clients.clientala"):
        importlib.import_module(f"flcore.{part}").read_client_data = read  # type: ignore[attr-defined]
    module = importlib.import_module(f"flcore.servers.server{arguments.method.removeprefix('fed')}")
    base = module.FedAvg if arguments.method == "fedavg" else module.FedALA
    ends: list[float] = []

    class Server(base):  # type: ignore[misc,valid-type]
        def evaluate(self) -> None:
            self.rs_test_acc.append(0.0)

        def save_results(self) -> None:
            pass

        def save_global_model(self) -> None:
            pass

        def aggregate_parameters(self) -> None:
            super().aggregate_parameters()
            ends.append(w.clock())

    rounds = arguments.warm_up + arguments.rounds
    settings = SimpleNamespace(
        model=torch_models.model(arguments.workload), algorithm=arguments.method, dataset="made",
        device="cpu", num_classes=10, num_clients=work.users, join_ratio=work.cohort / work.users,
        batch_size=work.batch, local_learning_rate=work.learning_rate, local_epochs=1,
        learning_rate_decay_gamma=1.0, global_rounds=rounds - 1, eval_gap=10 * rounds,
        goal="time", time_threthold=1e9, save_folder_name="unused", top_cnt=1, dlg_gap=1,
        batch_num_per_client=1, eta=1.0, rand_percent=80, layer_idx=2, **OFF,
    )  # fmt: skip
    began = w.clock()
    server = Server(settings, 0)
    server.train()
    probe = (torch.from_numpy(array) for array in work.probe(data))
    loss = torch_models.loss_of(server.global_model, *probe)
    w.tell("PFLlib", ends, began, arguments.warm_up, loss)


if __name__ == "__main__":
    main()
