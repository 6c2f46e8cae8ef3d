"""Compare one round of the authors' code with fedloom's, on the same weights and batches.

The script downloads and copies nothing: pass the folders of your clones. Repositories import
packages that a round does not use (torchvision, wandb, tqdm, ...). Empty stand-ins replace those
that are not installed.

    python benchmarks/authors.py --fedbabu FOLDER --fedproto FOLDER --fedntd FOLDER --ifca FOLDER
        --fedpac FOLDER --fedas FOLDER --pfedfda FOLDER

    FedBABU    https://github.com/jhoon-oh/FedBABU      (read at e34c15b)
    FedProto   https://github.com/yuetan031/FedProto    (97e42e2)
    FedNTD     https://github.com/Lee-Gihun/FedNTD      (be00ee5)
    IFCA       https://github.com/jichan3751/ifca       (61e44b8)
    FedPAC     https://github.com/JianXu95/FedPAC       (5770f4f)
    FedAS      https://github.com/xiyuanyang45/FedAS    (1a4f5fd)
    pFedFDA    https://github.com/cj-mclaughlin/pFedFDA (73c7c40)

Four details differ from the repositories:

- FedPAC: both sides use fedloom's shares of heads. The authors' code needs a solver (cvxpy) and a
  function that torch no longer has.
- FedAS: each client aligns a copy of the server's base. In the authors' code all clients align the
  same base, one after the other.
- pFedFDA: the shares of the Gaussians are 1/2 on both sides. The features come from the trained
  model instead of all training passes.
- pFedFDA: the covariances do not have the additional 1e-4 in every entry.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedloom.algorithms.fedpac import head_shares
from fedloom.algorithms.pfedfda import classifier as discriminant_head
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.engine import Job, inbox_of
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task

CLIENTS, SAMPLES, FEATURES, WIDTH, CLASSES, EPOCHS, RATE, MOMENTUM = 4, 12, 6, 5, 4, 3, 0.1, 0.5


class Net(nn.Module):
    """A base and a classifier `linear`, the name in FedBABU's code."""

    head = "linear"

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(FEATURES, WIDTH)
        self.linear = nn.Linear(WIDTH, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lower(x))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(self.features(x))
        return outputs


class WithFeatures(nn.Module):
    """The same in the form of FedProto's code: log-probabilities and features."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.net.features(x)
        return F.log_softmax(self.net.linear(z), 1), z


class World:
    """Clients of equal size with one batch of all samples in float64, so that orders do not
    matter.
    """

    def __init__(
        self, momentum: float = MOMENTUM, weight_decay: float = 0.0, **training: Any
    ) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(
            CLIENTS * SAMPLES, FEATURES, dtype=torch.float64, generator=generator
        )
        self.labels = torch.randint(CLASSES - 1, (CLIENTS * SAMPLES,), generator=generator)
        self.labels[:SAMPLES] = CLASSES - 1  # only this client has the last class
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = Net().double()
        settings: dict[str, Any] = {"learning_rate": RATE, "epochs": EPOCHS, "batch_size": SAMPLES}
        settings |= {"momentum": momentum, "weight_decay": weight_decay}
        self.training = Training(**{**settings, **training})

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's samples and labels."""
        columns = slice(client * SAMPLES, (client + 1) * SAMPLES)
        return self.inputs[columns], self.labels[columns]

    def federation(
        self, expression: str, rounds: int = 2, participation: float = 1.0
    ) -> Federation:
        """Return fedloom's federation of a method, by default with all clients in every round."""
        samples = Samples(self.inputs, self.labels)
        spans = [list(range(k * SAMPLES, (k + 1) * SAMPLES)) for k in range(CLIENTS)]
        data = Dataset("random", samples, samples, CLASSES)
        task = Task(
            data, samples, samples, Partition.of(spans), copy.deepcopy(self.net), self.training
        )
        schedule = Schedule(rounds=rounds, participation=participation)
        return Federation(build(expression), task, RowsEngine(task), schedule)


@contextmanager
def importing(folder: Path, *stand_ins: str) -> Iterator[Callable[[str], Any]]:
    """Provide a function that imports a module of a folder; stand-ins replace missing modules."""
    absent = {name: stand_in(name) for name in stand_ins if not _installed(name)}
    sys.modules.update(absent)
    with mock.patch.object(sys, "path", [str(folder.resolve()), *sys.path]):
        yield importlib.import_module
    theirs = [
        n
        for n, m in sys.modules.items()
        if str(getattr(m, "__file__", "")).startswith(str(folder.resolve()))
    ]
    for name in (*theirs, *absent):
        del sys.modules[name]


def stand_in(name: str) -> mock.MagicMock:
    """Return an empty module."""
    module = mock.MagicMock(__path__=[])
    module.__spec__ = ModuleSpec(name, None)
    return module


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def loaded(federation: Federation, row: Tensor) -> Net:
    """Return a net with the weights of a row."""
    net = copy.deepcopy(federation.task.model)
    federation.task.layout.load(net, row)
    assert isinstance(net, Net)
    return net


def gap(net: nn.Module, row: Tensor) -> float:
    """Return the largest difference between a net's weights and a row."""
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
    return float((weights - row[: len(weights)]).abs().max())


def personal(federation: Federation, client: int) -> Tensor:
    """Return the model that a client would deploy."""
    upcoming = federation._first.at(federation.finished + 1)
    pipeline = federation.pipeline
    message = pipeline.deploy(upcoming, (client,))
    task = Job(client, None, inbox_of(message, 0))
    assert isinstance(federation.engine, RowsEngine)
    ((_, row, _),) = federation.engine.personalised(pipeline, upcoming, [task])
    return row


def fedbabu(folder: Path) -> dict[str, float]:
    """Compare the averaged base after a round, and a client's tuned model."""
    world, run = World(), World().federation("fedbabu(finetune_epochs=2)")
    with importing(folder, "tqdm", "torchvision") as load:
        update, average = load("models.Update"), load("models.Fed").FedAvg
        options = SimpleNamespace(
            local_bs=SAMPLES, momentum=MOMENTUM, wd=0.0, local_ep=EPOCHS, device="cpu"
        )
        trainers = [
            update.LocalUpdate(options, list(zip(*world.data(k), strict=True)), range(SAMPLES))
            for k in range(CLIENTS)
        ]
        weights = [
            trainer.train(copy.deepcopy(world.net), body_lr=RATE, head_lr=0.0)[0]
            for trainer in trainers
        ]
        server = copy.deepcopy(world.net)
        server.load_state_dict(average(copy.deepcopy(weights)))
        tuned = copy.deepcopy(server)
        trainers[1].train(tuned, body_lr=RATE, head_lr=RATE, local_eps=2)
    run.step()
    return {
        "base after a round": gap(server, run.model()),
        "tuned model": gap(tuned, personal(run, 1)),
    }


def fedproto(folder: Path) -> dict[str, float]:
    """Compare models after round 2 from the same prototypes, and the mean of the prototypes."""
    world, run = World(), World().federation("fedproto")
    run.step()
    sent = {
        c: [p]
        for c, p in enumerate(run.algorithm.state["prototypes"])
        if run.algorithm.state["present"][c]
    }
    models_before = [run.engine.store.read(k)["fedproto_model"].clone() for k in range(CLIENTS)]  # type: ignore[attr-defined]
    run.step()
    models_after = [run.engine.store.read(k)["fedproto_model"] for k in range(CLIENTS)]  # type: ignore[attr-defined]
    with importing(folder / "lib", "models", "sampling", "femnist", "torchvision") as load:
        options = SimpleNamespace(
            device="cpu",
            local_bs=SAMPLES,
            optimizer="sgd",
            lr=RATE,
            train_ep=EPOCHS,
            ld=1,
            num_classes=CLASSES,
            verbose=0,
        )
        gaps, uploads = [], {}
        for k in range(CLIENTS):
            trainer = load("update").LocalUpdate(
                options, list(zip(*world.data(k), strict=True)), range(SAMPLES)
            )
            model = WithFeatures(loaded(run, models_before[k]))
            trainer.update_weights_het(options, k, sent, model, 2)
            gaps.append(gap(model, models_after[k]))
            z, labels = (
                loaded(run, models_after[k]).features(world.data(k)[0]).detach(),
                world.data(k)[1],
            )
            uploads[k] = {int(c): z[labels == c].mean(0) for c in labels.unique()}
        means = load("utils").proto_aggregation(uploads)
    ours = run.algorithm.state["prototypes"]
    return {
        "weights": max(gaps),
        "prototypes": max(float((p[0] - ours[c]).abs().max()) for c, p in means.items()),
    }


def fedntd(folder: Path) -> dict[str, float]:
    """Compare the averaged model after a round."""
    world, run = World(), World().federation("fedntd(fedavg, beta=0.8, temperature=2.0)")
    with importing(folder, "wandb", "torchvision") as load:
        trainer_type = load("algorithms.fedntd.ClientTrainer").ClientTrainer
        criterion = load("algorithms.fedntd.criterion").NTD_Loss(CLASSES, tau=2.0, beta=0.8)
        uploads = []
        for k in range(CLIENTS):
            trainer = trainer_type(
                criterion,
                algo_params=None,
                model=copy.deepcopy(world.net),
                local_epochs=EPOCHS,
                device="cpu",
                num_classes=CLASSES,
            )
            trainer.datasize, trainer.trainloader, trainer.testloader = (
                SAMPLES,
                [world.data(k)],
                [world.data(k)],
            )
            server = torch.optim.SGD(world.net.parameters(), lr=RATE, momentum=MOMENTUM)
            trainer.download_global(world.net.state_dict(), server.state_dict())
            trainer.train()
            uploads.append(torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()]))
    run.step()
    return {"model after a round": float((torch.stack(uploads).mean(0) - run.model()).abs().max())}


def ifca(folder: Path) -> dict[str, float]:
    """Compare every model after two rounds, without momentum: the authors' code has none."""
    world, run = World(), World(momentum=0.0).federation("ifca(k=2)")
    nets = [loaded(run, row) for row in run.algorithm.state["models"]]
    with importing(folder / "mnist", "torchvision", "torchvision.datasets") as load:
        experiment = load("train_cluster_mnist").TrainMNISTCluster(
            {"m": CLIENTS, "p": 2, "m_test": CLIENTS, "tau": EPOCHS}
        )
        experiment.load_data = lambda client, train=True: world.data(client)
        experiment.models, experiment.criterion = nets, nn.CrossEntropyLoss()
        experiment.dataset = {"train": {"cluster_assign": [0] * CLIENTS}}
        for _ in range(2):
            experiment.train(experiment.test(train=True)["cluster_assign"], lr=RATE)
            run.step()
    return {
        "models after two rounds": max(
            gap(net, row) for net, row in zip(nets, run.algorithm.state["models"], strict=True)
        )
    }


def fedpac(folder: Path) -> dict[str, float]:
    """Compare the base, the heads of all clients and the prototypes after round 2."""
    world, run = World(weight_decay=5e-4), World(weight_decay=5e-4).federation("fedpac")
    run.step()
    prototypes = dict(enumerate(run.algorithm.state["prototypes"]))
    starts = [personal(run, k) for k in range(CLIENTS)]
    run.step()
    keys = WithLogits.classifier_weight_keys
    options = SimpleNamespace(num_classes=CLASSES, device="cpu", lam=1.0, lr=RATE)
    with importing(folder, "cvxpy") as load:
        tools, local = load("tools"), load("methods.fedpac").LocalUpdate_FedPAC
        weights, variances, shares, means, sizes = [], [], [], [], []
        for k in range(CLIENTS):
            model = WithLogits(loaded(run, starts[k]))
            batches = DataLoader(TensorDataset(*world.data(k)), batch_size=SAMPLES)
            trainer = local(k, options, batches, batches, model)
            trainer.global_protos = prototypes
            variance, share = trainer.statistics_extraction()
            uploaded, *_, protos = trainer.local_training(EPOCHS, round=1)
            weights.append(copy.deepcopy(uploaded))
            variances.append(variance)
            shares.append(share)
            means.append(protos)
            sizes.append(trainer.sizes_label)
        server = tools.average_weights_weighted(weights, [SAMPLES] * CLIENTS)
        mixing = head_shares(torch.stack(shares).flatten(1), torch.tensor(variances))
        heads = [
            tools.agg_classifier_weighted_p(weights, mixing[k], keys, k) for k in range(CLIENTS)
        ]
        means = tools.protos_aggregation(means, sizes)
    theirs = WithLogits(copy.deepcopy(world.net))
    theirs.load_state_dict(server)
    rows = torch.stack([torch.cat([head[key].flatten() for key in keys]) for head in heads])
    state = run.algorithm.state
    return {
        "averaged model": gap(theirs, run.model()),
        "heads": float((rows - state["heads"]).abs().max()),
        "prototypes": max(
            float((p - state["prototypes"][c]).abs().max()) for c, p in means.items()
        ),
    }


class BaseAndHead(nn.Module):
    """The same in the form of FedAS' code."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.base = nn.Sequential(net.lower, nn.Tanh())
        self.head = net.linear

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.base(x))
        return outputs


def fedas(folder: Path) -> dict[str, float]:
    """Compare each client's model after round 2, and its trace of the Fisher information.

    The trace uses single samples.
    """
    world, run = World(), World().federation("fedas")
    run.step()
    store = run.engine.store  # type: ignore[attr-defined]
    models_before = [store.read(k)["fedas_model"].clone() for k in range(CLIENTS)]
    traces: dict[int, float] = {}
    server, algorithm = run.model().clone(), run.pipeline.algorithm
    fold = algorithm.fold

    def folding(round: Any, replies: Any) -> Any:
        traces.update(zip(replies.clients.tolist(), replies["fisher"].tolist(), strict=True))
        return fold(round, replies)

    with mock.patch.object(algorithm, "fold", folding):
        run.step()
    gaps, trace_gaps = [], []
    with importing(folder / "system", "utils.privacy", "utils.data_utils", "torchviz") as load:
        client_type = load("flcore.clients.clientas").clientAS
        for k in range(CLIENTS):
            client, data = client_type.__new__(client_type), TensorDataset(*world.data(k))
            model = BaseAndHead(loaded(run, models_before[k]))
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
            vars(client).update(
                model=model, optimizer=optimizer, loss=nn.CrossEntropyLoss(), num_classes=CLASSES, device="cpu", privacy=False,
                local_epochs=EPOCHS, train_slow=False, learning_rate_decay=False, wo_local=False, fim_trace_history=[],
                train_time_cost={"num_rounds": 0, "total_cost": 0.0},
                load_train_data=lambda batch_size=SAMPLES, data=data: DataLoader(data, batch_size),
            )  # fmt: skip
            client.set_parameters(BaseAndHead(loaded(run, server)), 0.0)
            client.train(is_selected=True)
            gaps.append(gap(client.model, store.read(k)["fedas_model"]))
            client.load_train_data = lambda data=data: DataLoader(data, 1)
            client.train(is_selected=False)
            trace_gaps.append(abs(client.fim_trace_history[-1] / SAMPLES - traces[k]) / traces[k])
    return {"models": max(gaps), "traces, relative": max(trace_gaps)}


class WithLogits(nn.Module):
    """The same in the form of FedPAC's and pFedFDA's code: features, logits and a classifier
    `fc`.
    """

    classifier_weight_keys: ClassVar[list[str]] = ["net.linear.weight", "net.linear.bias"]

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    @property
    def fc(self) -> nn.Module:
        return self.net.linear

    def forward(self, x: Tensor, return_feat: bool = True) -> tuple[Tensor, Tensor]:
        z = self.net.features(x)
        return z, self.net.linear(z)


def pfedfda(folder: Path) -> dict[str, float]:
    """Compare the averaged base and Gaussians after a round, and a client's head in it."""
    half = torch.full((2,), 0.5, dtype=torch.float64)
    with mock.patch("fedloom.algorithms.pfedfda.validated_shares", return_value=half):
        world, run = World(), World().federation("pfedfda")
        sent = run.algorithm.state["gaussians"].clone()
        run.step()
    statistics = ("statsmodels", "statsmodels.stats", "statsmodels.stats.correlation_tools")
    absent = ("torchmin", *statistics, "data", "data.utils", "data.utils.loader")
    bases, means, covariances, heads = [], [], [], []
    with (
        importing(folder, *absent) as load,
        mock.patch.object(Tensor, "cuda", lambda self, *_: self),
        float64(),
    ):
        module = load("clients.client_fedfda")
        module.cov_nearest = lambda covariance, **_: covariance  # positive definite
        for k in range(CLIENTS):
            trainer, (inputs, labels) = (
                module.ClientFedFDA.__new__(module.ClientFedFDA),
                world.data(k),
            )
            prior = F.one_hot(labels, CLASSES).double().mean(0) + 1e-4
            vars(trainer).update(
                model=WithLogits(copy.deepcopy(world.net)), device="cpu", D=WIDTH, num_classes=CLASSES, eps=1e-4,
                lr=RATE, momentum=MOMENTUM, wd=0.0, local_epochs=EPOCHS, loss=nn.CrossEntropyLoss(), batch_size=SAMPLES,
                num_train=SAMPLES, trainset=TensorDataset(inputs, labels), priors=prior / prior.sum(), min_samples=2,
                means=sent[:CLASSES].clone(), covariance=sent[CLASSES:].clone(), solve_beta=lambda *_: None,
                global_means=sent[:CLASSES].clone(), global_covariance=sent[CLASSES:].clone(),
                adaptive_means=sent[:CLASSES].clone(), adaptive_covariance=sent[CLASSES:].clone(),
                means_beta=torch.full((CLASSES,), 0.5), cov_beta=torch.tensor([0.5]),
            )  # fmt: skip
            trainer.train()
            net = trainer.model.net
            bases.append(
                torch.cat([parameter.detach().flatten() for parameter in net.lower.parameters()])
            )
            weight, bias = discriminant_head(sent, trainer.priors)
            heads.append(
                float(
                    (net.linear.weight - weight).abs().max() + (net.linear.bias - bias).abs().max()
                )
            )
            class_means, scatter, *_ = trainer.compute_mle_statistics(
                feats=net.features(inputs).detach(), labels=labels.numpy()
            )
            client_means = torch.stack(
                [sent[c] if mean is None else mean for c, mean in enumerate(class_means)]
            )
            trainer.update(client_means, scatter / (SAMPLES - 1) + torch.eye(WIDTH))
            means.append(trainer.adaptive_means)
            covariances.append(trainer.adaptive_covariance)
    base = torch.stack(bases).mean(0)
    gaussians = torch.cat([torch.stack(means).mean(0), torch.stack(covariances).mean(0)])
    return {
        "head": max(heads),
        "averaged base": float((base - run.model()[: len(base)]).abs().max()),
        "averaged Gaussians": float((gaussians - run.algorithm.state["gaussians"]).abs().max()),
    }


@contextmanager
def float64() -> Iterator[None]:
    """Make float64 the type of new tensors, as in `torch.Tensor(...)`."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


METHODS = {
    "fedbabu": fedbabu, "fedproto": fedproto, "fedntd": fedntd, "ifca": ifca, "fedpac": fedpac, "fedas": fedas,
    "pfedfda": pfedfda,
}  # fmt: skip


Comparison = Callable[[Path], dict[str, float]]


def main(description: str | None, comparisons: Mapping[str, Comparison]) -> None:
    """Print the largest difference of each compared quantity.

    Args:
        description: The help text, with the sources of the repositories.
        comparisons: Comparison with the code in a folder, by the name of the option.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in comparisons:
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER")
    folders = vars(parser.parse_args())
    if not any(folders.values()):
        parser.error("give the folder of one repository at least; --help says where they are")
    torch.set_num_threads(1)
    print("| code | compared | largest difference |\n|---|---|---|")
    for name, compare in comparisons.items():
        folder = folders[name.replace("-", "_")]
        for quantity, difference in compare(folder).items() if folder else ():
            print(f"| {name} | {quantity} | {difference:.1e} |", flush=True)


if __name__ == "__main__":
    main(__doc__, METHODS)
