"""Compare rounds of public code of FedUmf's, FedMR's and FedMut's rivals with fedloom's.

As `authors.py`, on the same weights and batches in float64: the script downloads and copies
nothing. Pass the folders of your clones:

    python benchmarks/authors_rivals.py --fl-simulator FOLDER --fl-sam FOLDER --fedacg FOLDER
        --fedgloss FOLDER --mifa FOLDER --fedstale FOLDER

    FL-Simulator  https://github.com/woodenchild95/FL-Simulator (read at 502bec6): FedSpeed, FedSMOO
                  and FedInit by their authors, and versions of FedCM and MoFedSAM
    FL-SAM        https://github.com/harrylee999/FL-SAM         (2c16149): FedGMT
    FedACG        https://github.com/geehokim/FedACG            (62b6e95)
    FedGloSS      https://github.com/pietrocagnasso/fedgloss    (cbd6cf5)
    MIFA          https://github.com/hmgxr128/MIFA_code         (c1099d9), without waiting
    FedStale      https://github.com/arodio/FedStale            (de3c12e)

Four details:

- FL-Simulator adds 1e-7 to norms. FedGloSS averages in float32; in float64 here.
- FedGloSS' code renews the dual and the anchor in every epoch. Clients train for one epoch here.
- MIFA's learning rate decays by 0.9 in both, instead of 1 / (t + 1).
- FedStale: the server's step is compared, with client updates of plain SGD.

Not compared: FedLESAM, FedSWA and FedLaAvg, whose public code differs from the paper; FedVARP,
CA2FL and FedMuon in the form of Takezawa et al., without code of the authors.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from authors import (
    CLASSES,
    CLIENTS,
    EPOCHS,
    MOMENTUM,
    RATE,
    SAMPLES,
    Comparison,
    World,
    float64,
    gap,
    importing,
    main,
    stand_in,
)

ROUNDS = 3
DECAY = 0.9


def flat(net: nn.Module) -> Tensor:
    """Return the weights of a net as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def trained(world: World, row: Tensor, client: int, rate: float) -> Tensor:
    """Return the weights after plain SGD on one client's samples."""
    net = copy.deepcopy(world.net)
    nn.utils.vector_to_parameters(row.clone(), net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    inputs, labels = world.data(client)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return flat(net)


def samples_of(world: World, client: int) -> TensorDataset:
    return TensorDataset(*world.data(client))


SIMULATED = {
    "FedSpeed": ("fedspeed(alpha=0.2, rho=0.1)", {}),
    "FedSMOO": ("fedsmoo(alpha=0.2, rho=0.1)", {}),
    "FedCM": ("fedcm(alpha=0.3)", {}),
    "MoFedSAM": ("mofedsam(alpha=0.3, rho=0.1)", {}),
    "FedAvg": ("fedinit(beta=0.1)", {"use_RI": True}),
}
"""fedloom's expression and options of the repository, by the repository's name."""


def fl_simulator(folder: Path) -> dict[str, float]:
    """Compare the server's model after three rounds of each method."""
    options = SimpleNamespace(
        total_client=CLIENTS, comm_rounds=ROUNDS, active_ratio=1.0, seed=0, method="", dataset="",
        local_learning_rate=RATE, global_learning_rate=1.0, lr_decay=1.0, weight_decay=0.0,
        batchsize=SAMPLES, local_epochs=EPOCHS, lamb=0.2, rho=0.1, alpha=0.3, beta=0.1, use_RI=False,
    )  # fmt: skip
    differences = {}
    for name, (expression, changes) in SIMULATED.items():
        world = World(momentum=0.0)
        run = world.federation(expression, rounds=ROUNDS)
        run.run()
        data = [world.data(client) for client in range(CLIENTS)]
        datasets = SimpleNamespace(client_x=[x for x, _ in data], client_y=[y for _, y in data])
        with importing(folder, "torchvision", "torchvision.transforms") as load, float64():
            arguments = SimpleNamespace(**{**vars(options), **changes})
            given = mock.patch.object(
                load("client.client"), "Dataset", lambda x, y, **_: TensorDataset(x, y)
            )
            server_type = getattr(load(f"server.{name}"), name)
            with given, mock.patch.multiple(server_type, _test_=_nothing, _save_results_=_nothing):
                net = copy.deepcopy(world.net)
                server = server_type(
                    "cpu",
                    lambda net=net: copy.deepcopy(net),
                    net,
                    flat(net),
                    datasets,
                    "",
                    arguments,
                )
                server.train()
        title = expression.partition("(")[0]
        differences[f"{title}: model"] = gap(server.server_model, run.model())
    return differences


def _nothing(*_: Any, **__: Any) -> None:
    """Replace a method that evaluates or saves."""


def fl_sam(folder: Path) -> dict[str, float]:
    """Compare model and teacher of FedGMT after three rounds."""
    world = World(weight_decay=1e-5)
    run = world.federation("fedgmt(alpha=0.9, gamma=0.5, temperature=3, beta=10)", rounds=ROUNDS)
    run.run()
    options = SimpleNamespace(
        device="cpu", dataset="agnews", num_classes=CLASSES, global_rounds=ROUNDS, save_gap=100,
        local_epochs=EPOCHS, batch_size=SAMPLES, local_learning_rate=RATE, lr_decay=1.0,
        model=copy.deepcopy(world.net), num_clients=CLIENTS, join_ratio=1.0, algorithm="", rho=0.1,
        tau=3.0, alpha=0.9, gama=0.5, beta=10.0, momentum=MOMENTUM,
    )  # fmt: skip
    absent = (
        "torchvision",
        "torchvision.transforms",
        "tqdm",
        "pynvml",
        "psutil",
        "ujson",
        "calmsize",
    )
    with importing(folder / "system", *absent) as load, float64():
        base, client = load("flcore.servers.serverbase"), load("flcore.clients.clientbase")
        module = load("flcore.servers.servergmt")
        with (
            mock.patch.object(base, "read_data", return_value=samples_of(world, 0)),
            mock.patch.object(base, "read_client_json", return_value=(SAMPLES, None)),
            mock.patch.object(client, "read_client_data", lambda _, k: samples_of(world, k)),
            mock.patch.object(module, "tqdm", lambda rounds, **_: rounds),
            mock.patch.object(module, "get_gpu_memory_usage", return_value=(0.0, 0.0)),
            mock.patch.object(module.statistics, "stdev", return_value=0.0),
            mock.patch.object(module.FedGMT, "evaluate", lambda server: server.test_acc.append(0)),
        ):
            server = module.FedGMT(options)
            server.train()
    teacher = run.algorithm.state["teacher"]
    return {
        "fedgmt: model": gap(server.global_model, run.model()),
        "fedgmt: teacher": gap(server.EMA_model, teacher),
    }


class Options(dict[str, Any]):
    """Options with attributes, as OmegaConf's."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class WithLogit(nn.Module):
    """The net in the form of FedACG's code."""

    num_layers = 1

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logit": self.net(x)}


class CountedSamples(TensorDataset):
    """Samples in the form of FedACG's code."""

    class_dict = {"0": SAMPLES}  # noqa: RUF012


def fedacg(folder: Path) -> dict[str, float]:
    """Compare the server's model and momentum after three rounds."""
    world = World()
    run = world.federation("fedacg(momentum=0.85, beta=0.01)", rounds=ROUNDS)
    run.run()
    options = Options(
        client=Options(ce_loss=Options(weight=1.0), prox_loss=Options(weight=0.01)),
        server=Options(momentum=0.85, FedACG=True),
        trainer=Options(local_epochs=EPOCHS, local_lr_decay=1.0),
        optimizer=Options(momentum=MOMENTUM, wd=0.0),
        dataset=Options(num_instances=0, name=""),
        batch_size=SAMPLES, num_workers=0, pin_memory=False, use_amp=False,
    )  # fmt: skip
    absent = (
        "torchvision", "omegaconf", "hydra", "wandb", "tqdm", "matplotlib", "matplotlib.pyplot",
        "sklearn.manifold", "tabulate",
    )  # fmt: skip
    unused = {
        name: stand_in(name) for name in ("datasets", "datasets.cifar", "models", "utils.metrics")
    }
    with mock.patch.dict(sys.modules, unused), importing(folder, *absent) as load:
        client_type, server_type = load("clients.base_client").Client, load("servers.base").ServerM
        server, model = server_type(options), WithLogit(copy.deepcopy(world.net))
        server.set_momentum(model)
        clients = [client_type(options, k, copy.deepcopy(model)) for k in range(CLIENTS)]
        for number in range(ROUNDS):
            model = server.FedACG_lookahead(model)
            sent = copy.deepcopy(model.state_dict())
            states = []
            for k, client in enumerate(clients):
                client.setup(sent, "cpu", CountedSamples(*world.data(k)), RATE, number + 1, None)
                states.append(copy.deepcopy(client.local_train(number + 1)[0]))
            weights = {name: [state[name] for state in states] for name in sent}
            moved = {name: [state[name] - sent[name] for state in states] for name in sent}
            model.load_state_dict(server.aggregate(weights, moved, range(CLIENTS), sent, RATE))
    momentum = torch.cat([rows.reshape(-1) for rows in server.global_momentum.values()])
    return {
        "model": gap(model, run.model()),
        "momentum": float((momentum - run.algorithm.state["momentum"]).abs().max()),
    }


def fedgloss(folder: Path) -> dict[str, float]:
    """Compare the server's model and dual after three rounds of one epoch."""
    world = World(epochs=1)
    expression = "fedgloss(rho=0.1, client_rho=0.05, beta=5)"
    run = world.federation(expression, rounds=ROUNDS)
    run.run()
    absent = ("torchvision", "torchvision.transforms", "wandb")
    with importing(folder / "codebase", *absent) as load, float64():
        model = copy.deepcopy(world.net)
        model.device = "cpu"  # type: ignore[assignment]
        server_type = load("servers.fedgloss_server").FedGloSSServer
        client_type = load("clients.fedgloss_client").FedGloSSClient
        server = server_type(model, "sgd", 1.0, 0.1, 0.05, 0.0, 0, ROUNDS, 5.0, CLIENTS)
        clients = []
        for k in range(CLIENTS):
            client = client_type.__new__(client_type)
            loader = DataLoader(samples_of(world, k), batch_size=SAMPLES)
            vars(client).update(
                id=k, _model=copy.deepcopy(model), device="cpu", lr=RATE, weight_decay=0.0, momentum=MOMENTUM,
                trainloader=loader, train_data=samples_of(world, k), dataset="", eta=0.0, beta=5.0,
                train_transforms={"": lambda x: x},
                state={name: torch.zeros_like(p) for name, p in model.named_parameters()},
            )  # fmt: skip
            clients.append(client)
        with (
            mock.patch.object(server_type, "_update_sys_metrics", lambda *given: given[-1]),
            mock.patch.object(torch, "FloatTensor", torch.DoubleTensor),
        ):
            for _ in range(ROUNDS):
                server.train_model(num_epochs=1, clients=clients)
                server.update_model()
    parts = ("lower.weight", "lower.bias", "linear.weight", "linear.bias")
    theirs = torch.cat([server.model[name].reshape(-1) for name in parts])
    dual = torch.cat([server.sigma[name].reshape(-1) for name in parts])
    return {
        "model": float((theirs - run.model()).abs().max()),
        "dual": float((dual - run.algorithm.state["dual"]).abs().max()),
    }


def selected(run: Any) -> list[Sequence[int]]:
    """Return the clients of each round."""
    return [record["clients"] for record in run.history]


def mifa(folder: Path) -> dict[str, float]:
    """Compare the server's model after rounds with half of the clients and a falling rate."""
    world = World(momentum=0.0, decay=DECAY)
    run = world.federation("mifa", rounds=2 * ROUNDS, participation=0.5)
    run.run()
    with importing(folder) as load, float64(), required_argument():
        trainer_type = load("src.trainers.fdu_no_wait").FDU_nowait_Trainer
        net = copy.deepcopy(world.net)
        optimizer = load("src.optimizers.gd").GD(net.parameters(), lr=RATE, weight_decay=0.0)
        worker = load("src.models.worker").Worker(net, optimizer, {"local_step": EPOCHS})
        clients = [
            load("src.models.client").Client(
                k, None, 1.0, samples_of(world, k), samples_of(world, k), SAMPLES, worker
            )
            for k in range(CLIENTS)
        ]
        rounds = iter(selected(run))

        def decay(number: int) -> None:
            optimizer.param_groups[0]["lr"] = RATE * DECAY**number

        trainer = trainer_type.__new__(trainer_type)
        vars(trainer).update(
            optimizer=optimizer, worker=worker, clients=clients, num_round=2 * ROUNDS, clients_per_round=0,
            print_result=False, logger=mock.MagicMock(), evaluate_train=lambda: (0, 0), evaluate_test=lambda: (0, 0),
            get_avail_clients=lambda seed: [clients[k] for k in next(rounds)],
        )  # fmt: skip
        with mock.patch.object(optimizer, "inverse_prop_decay_learning_rate", decay):
            trainer.train()
    return {"model": float((trainer.latest_model - run.model()).abs().max())}


def required_argument() -> Any:
    """Provide the marker of required arguments, which torch's optimizers no longer have."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    return mock.patch.object(module, "required", object(), create=True)


class Learner:
    """A model with gradients as vectors, in the form of FedStale's code."""

    device = "cpu"

    def __init__(self, net: nn.Module) -> None:
        self.model = copy.deepcopy(net)
        self.zero_grad()

    def zero_grad(self) -> None:
        self.set_grad_tensor(torch.zeros_like(flat(self.model)))

    def get_grad_tensor(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None])

    def set_grad_tensor(self, row: Tensor) -> None:
        sizes = [parameter.numel() for parameter in self.model.parameters()]
        for parameter, part in zip(self.model.parameters(), row.split(sizes), strict=True):
            parameter.grad = part.reshape(parameter.shape).clone()


def fedstale(folder: Path) -> dict[str, float]:
    """Compare the server's step over rounds with half of the clients."""
    world = World(momentum=0.0)
    run = world.federation("fedstale(beta=0.4)", rounds=2 * ROUNDS, participation=0.5)
    run.run()
    with required_argument(), importing(folder, "tqdm") as load, float64():
        tools = load("utils.torch_utils")
        server = Learner(world.net)
        step = load("utils.optim").HistorySGD(
            server.model.parameters(), lr=1.0, history_coefficient=0.4
        )
        learners = [Learner(world.net) for _ in range(CLIENTS)]
        tracker = load("history_tracker").HistoryTracker(
            range(CLIENTS), learners, Learner(world.net)
        )
        weights = torch.full((CLIENTS,), 1 / CLIENTS)
        for clients in selected(run):
            row, updates = flat(server.model), [Learner(world.net) for _ in clients]
            for update, client in zip(updates, clients, strict=True):
                update.set_grad_tensor(row - trained(world, row, client, RATE))
            inverse = weights[list(clients)] / 0.5
            history = tracker.average(list(clients), range(CLIENTS), inverse, weights)
            step.update_history(history.model.parameters())
            server.zero_grad()
            tools.average_learners(
                updates, server, weights=inverse, average_params=False, average_gradients=True
            )
            step.step()
            tracker.update_history(dict(zip(clients, updates, strict=True)))
    return {"model": gap(server.model, run.model())}


METHODS: dict[str, Comparison] = {
    "fl-simulator": fl_simulator, "fl-sam": fl_sam, "fedacg": fedacg, "fedgloss": fedgloss, "mifa": mifa,
    "fedstale": fedstale,
}  # fmt: skip


if __name__ == "__main__":
    main(__doc__, METHODS)
