"""FedALA's settings, methods, tables and figures.

The protocol (section "Experiments", with the authors' code where the paper is silent): training and test part are merged, 20
clients that all take part keep a quarter of their samples for testing; plain SGD, batch 10 with the last short batch dropped,
one local epoch, rate 0.005, or 0.1 for the CNN on MNIST, fastText and ResNet-18; 2,000 rounds, 5 runs. The score is the best
over rounds of the accuracy of the clients' own models on their own test samples, before local training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fedloom.papers.numbers import Number, printed
from fedloom.papers.protocols import (
    Beside,
    Cell,
    Exhibit,
    Measure,
    Printed,
    Recorders,
    Setting,
    heterogeneity,
    nothing,
)

ROUNDS = 2000

DATA = {
    "mnist": ("MNIST", "mnist(normalise=half)", 2),
    "cifar10": ("CIFAR-10", "cifar10(normalise=half)", 2),
    "cifar100": ("CIFAR-100", "cifar100(normalise=half)", 10),
    "tiny_imagenet": ("Tiny-ImageNet", "tiny_imagenet(normalise=half, test=held_out)", None),
    "ag_news": ("AG News", "ag_news(vocabulary_from=all)", None),
}
"""What the paper calls it, the expression, and the classes of a client in the pathological setting."""

MODELS = {"cnn4": "", "resnet18": "ResNet-18 ", "fasttext": ""}
"""Named in a column where a data set has two."""

_LEARNING = "threshold=0.01, sampling=window, epoch_loss=last"
"""How the authors' code learns ALA's weights."""

METHODS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox(mu=0.001)",
    "FedAvg-C": "fedavg_c(finetune_epochs=10)",
    "FedProx-C": "fedprox_c(finetune_epochs=10, mu=0.001)",
    "Per-FedAvg": "per_fedavg(passes=2)",
    "FedRep": "fedrep(head_epochs=5)",
    "pFedMe": "pfedme(regularisation=15.0, personal_rate=0.01, inner_steps=5, beta=1.0, inner_weight_decay=0.001)",
    "Ditto": "ditto(regularisation=0.1, personal_epochs=2)",
    "FedAMP": "fedamp(alpha=1000.0, regularisation=1.0, sigma=0.1, norm=plain)",
    "FedPHP": "fedphp(mu=0.9, transfer=0.01, deployed=local)",
    "FedFomo": "fedfomo",
    "APPLE": "apple(relation_rate=0.01, mu=0.1, decline=0.2, initial=uniform, variant=pfllib)",
    "PartialFed": "partialfed(model_batches=8, strategy_batches=2)",
    "FedALA": f"fedala(p=1, percent=80.0, rate=1.0, {_LEARNING})",
}

LOCAL_STATISTICS = {"FedAvg": "silobn", "FedProx": "fedprox_c(finetune_epochs=0, mu=0.001)"}
"""The same methods where batch-norm statistics never leave the clients, as in the authors' code, which sends parameters alone
(FedProx-C without fine-tuning is FedProx; the other methods here keep them by default)."""

PERSONAL = Measure("personal")


def setting(
    data: str,
    distribution: str,
    model: str = "cnn4",
    *,
    clients: int = 20,
    participation: float = 1.0,
    rounds: int = ROUNDS,
    record: Recorders = nothing,
    runs: int = 5,
) -> Setting:
    """A setting in the words of the numbers, such as `setting("cifar100", "dir:0.1", clients=50)`."""
    label, expression, _ = DATA[data]
    kind, _, value = distribution.partition(":")
    # min(B / (1 - 0.75), n / (2 N)) samples at least, which is 40 with batches of 10 everywhere here
    partition = f"dirichlet({value}, minimum=40)" if kind == "dir" else f"pathological({value})"
    fast = data == "mnist" or model in ("fasttext", "resnet18")
    words = f"{label} {MODELS[model]}{heterogeneity(distribution)}"
    words += f" {clients} clients" if clients != 20 else ""
    words += f" {participation:.0%} of them" if participation < 1 else ""
    return Setting(
        paper="fedala",
        name=words,
        data=expression,
        clients=clients,
        partition=partition,
        model=model,
        training={"learning_rate": 0.1 if fast else 0.005, "batch_size": 10, "epochs": 1, "drop_last": True},
        rounds=rounds,
        participation=participation,
        evaluate_every=1,
        personal=True,
        seeds=tuple(range(runs)),
        record=record,
    )


def method(name: str, model: str = "cnn4") -> str:
    """A method of the tables; `Ditto+ALA` is ALA in front of Ditto."""
    inner, plus, _ = name.partition("+")
    own = LOCAL_STATISTICS.get(inner, METHODS[inner]) if model == "resnet18" else METHODS[inner]
    return f"ala({own}, {_LEARNING})" if plus else own


def _home(number: Number) -> Setting:
    return setting(
        number["dataset"],
        number["heterogeneity"],
        number["model"],
        clients=number.get("clients", 20),
        participation=number["participation"],
    )


def accuracy_table(table: str) -> list[Cell]:
    """Tables 2, 4 and 7; of table 4 also what ALA improves other methods by."""
    found, gains = [], []
    for number in printed("fedala", table):
        where = _home(number)
        measure = PERSONAL if number["metric"] == "test_acc_pct" else Measure("joining")
        value = Printed(number["mean"], number["std"])
        name = number["method"]
        algorithm = method(name, where.model)
        found.append(Cell(name, where.name, where, algorithm, measure, value))
        if "improvement" in number:
            alone = name.removesuffix("+ALA")
            beside = Beside(alone, where, method(alone, where.model))
            gain = Printed(number["improvement"])
            gains.append(
                Cell(name, f"{where.name} improvement", where, algorithm, Measure("improvement"), gain, beside)
            )
    return [*found, *gains]


def weight_table(table: str) -> list[Cell]:
    """Tables 1 and 6: accuracy for shares s of the data and ranges p of layers, and how many weights ALA learns."""
    found, counts = [], []
    seen = set()
    for number in printed("fedala", table):
        where, s, p = _home(number), number["s"], number["p"]
        if (where.name, s, p) in seen:
            continue  # s = 80, p = 1 stands in both halves of table 1
        seen.add((where.name, s, p))
        row, algorithm = f"s={s} p={p}", f"fedala(p={p}, percent={float(s)}, rate=1.0, {_LEARNING})"
        found.append(Cell(row, where.name, where, algorithm, PERSONAL, Printed(number["mean"], number["std"])))
        millions = number.get("ala_params_million")
        weights = number["ala_params"] if millions is None else 1e6 * millions
        counts.append(Cell(row, f"{where.name} weights", where, algorithm, Measure("weights"), Printed(weights)))
    return [*found, *counts]


_SENT = {"FedRep": None, "FedFomo": Printed(21.0), "APPLE": Printed(20.0)}
"""Models of a client and round where they are not 2: M = N = 20 and M = N - 1; FedRep's 2 alpha_f depends on the model."""


def overhead_table() -> list[Cell]:
    """Table 3: minutes in all and a round, on the authors' machine, and models sent by one client."""
    numbers = printed("fedala", "3")
    base = next(number["time_per_iter_min"] for number in numbers if number["method"] == "FedAvg")
    found = []
    for number in numbers:
        name, where = number["method"], _home(number)
        each = number["time_per_iter_min"]
        values = (
            ("time", Measure("total"), Printed(float(number["total_time_min"]))),
            ("time a round", Measure("minutes"), Printed(each)),
            ("time over FedAvg's", Measure("slower"), Printed(each / base)),
            ("models sent", Measure("models", a_client=True), _SENT.get(name, Printed(2.0))),
        )
        beside = Beside("FedAvg", where, method("FedAvg", where.model))
        for what, one, value in values:
            algorithm, other = method(name, where.model), beside if one.kind == "slower" else None
            found.append(Cell(name, f"{where.name} {what}", where, algorithm, one, value, other))
    return found


def blending_figure() -> list[Cell]:
    """Figure 3: the loss of client 8 over the epochs of weight learning, at least six in each round, in the default
    heterogeneous setting (the caption names no other)."""

    def record(rounds: int) -> tuple[str, ...]:
        return ("ala(client=8)",)

    algorithm = f"fedala(p=1, percent=80.0, rate=1.0, {_LEARNING}, epochs=6)"
    settings = [setting(data, "dir:0.1", record=record, runs=1) for data in ("mnist", "cifar10")]
    return [Cell("FedALA", where.name, where, algorithm, PERSONAL) for where in settings]


def trajectory_figure() -> list[Cell]:
    """Figure 4: the models of client 4 in rounds 140 to 200; ALA begins in round 156."""

    def record(rounds: int) -> tuple[str, ...]:
        return ("trajectory(client=4, first=140, last=200)",) if rounds >= 200 else ("trajectory(client=4)",)

    where = setting("mnist", "pathological:2", rounds=200, record=record, runs=1)
    rows = {"FedAvg": "fedavg", "FedALA": f"fedala(p=1, percent=80.0, rate=1.0, {_LEARNING}, start_round=156)"}
    return [Cell(row, where.name, where, algorithm, PERSONAL) for row, algorithm in rows.items()]


def objective_figure() -> list[Cell]:
    """Figure 5: the global objective before and after local training, a dot every 60 rounds."""

    def record(rounds: int) -> tuple[str, ...]:
        return (f"objective(every={max(1, min(60, rounds // 10))})",)

    where = setting("mnist", "pathological:2", record=record, runs=1)
    return [Cell("FedALA", where.name, where, METHODS["FedALA"], PERSONAL)]


def bubbles(settings: Iterable[tuple[str, str, int]]) -> list[Cell]:
    """Figures 6 to 9: which client holds how many samples of which class. One round, for the report that draws it."""
    found = []
    for data, distribution, clients in settings:
        where = setting(data, distribution, clients=clients, rounds=1, runs=1)
        found.append(Cell("labels", where.name, where, "fedavg", Measure("classes")))
    return found


def exhibits() -> list[Exhibit]:
    """All tables and figures that are not drawings."""
    three = ("mnist", "cifar10", "cifar100")
    figures: list[tuple[int, str, Callable[[], list[Cell]]]] = [
        (3, "loss while ALA's weights are learned, client 8", blending_figure),
        (4, "models of client 4 over its loss surface", trajectory_figure),
        (5, "objective before and after local training", objective_figure),
        (
            6,
            "labels of the clients, Tiny-ImageNet",
            lambda: bubbles(("tiny_imagenet", f"dir:{beta}", 20) for beta in ("0.01", "0.1", "0.5")),
        ),
        (
            7,
            "labels of the clients, pathological",
            lambda: bubbles((data, f"pathological:{DATA[data][2]}", 20) for data in three),
        ),
        (8, "labels of the clients, Dir(0.1)", lambda: bubbles((data, "dir:0.1", 20) for data in three)),
        (
            9,
            "labels of 50 and 100 clients, CIFAR-100",
            lambda: bubbles(("cifar100", "dir:0.1", clients) for clients in (50, 100)),
        ),
    ]
    return [
        Exhibit("fedala.table-1", "shares s of the data and ranges p of layers", lambda: weight_table("1")),
        Exhibit("fedala.table-2", "personal accuracy, 14 methods", lambda: accuracy_table("2")),
        Exhibit("fedala.table-3", "time and traffic", overhead_table),
        Exhibit("fedala.table-4", "heterogeneity, scale, ALA on other methods", lambda: accuracy_table("4")),
        Exhibit("fedala.table-6", "ranges p of layers, CNN and fastText", lambda: weight_table("6")),
        Exhibit("fedala.table-7", "MNIST Dir(0.1); half of 100 clients a round", lambda: accuracy_table("7")),
        *(Exhibit(f"fedala.figure-{number}", shows, make) for number, shows, make in figures),
    ]


DRAWINGS = {
    "fedala.figure-1": "a drawing",
    "fedala.figure-2": "a drawing",
    "fedala.table-5": "a list of which layers each p covers, no result",
}
