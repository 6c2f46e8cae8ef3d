"""Compare FedAvg with central training for each objective, on data without download.

    python benchmarks/objectives.py

FedAvg has ten clients. Central training is plain PyTorch on the same model, with the same number of
epochs over all samples. The script also fits scikit-learn's own solution, if one exists. It prints
the table of `docs/data.md`.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, root_mean_squared_error
from sklearn.multiclass import OneVsRestClassifier
from torch import Tensor, nn

import fedloom as fl
from fedloom.objectives import Objective, objectives
from fedloom.rounds.scoring import Evaluator

ROUNDS, EPOCHS, CLIENTS, TOKENS = 40, 4, 10, 16


def halves(inputs: Tensor, targets: Tensor, **about: object) -> fl.Dataset:
    """Use four fifths of the samples for training, the others for tests."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    behind = 4 * len(order) // 5
    splits = [
        fl.Samples(inputs[indices], targets[indices])
        for indices in (order[:behind], order[behind:])
    ]
    return fl.Dataset(str(about.pop("name")), splits[0], splits[1], **about)  # type: ignore[arg-type]


def multilabel() -> fl.Dataset:
    """Return digits with three labels: is it odd, is it above 4, does it have a loop."""
    images, digits = load_digits(return_X_y=True)
    labels = np.stack([digits % 2 == 1, digits > 4, np.isin(digits, [0, 6, 8, 9])], 1)
    inputs = torch.from_numpy(images / 16).float()
    return halves(
        inputs, torch.from_numpy(labels).float(), name="digits", objective=objective("multilabel")
    )


def sequence() -> fl.Dataset:
    """Return scikit-learn's descriptions of four of its data sets, to predict characters."""
    loads = (load_digits, load_diabetes, load_wine, load_breast_cancer)
    text = "".join(load().DESCR for load in loads)
    alphabet = sorted(set(text))
    tokens = torch.tensor([alphabet.index(character) for character in text])
    count = (len(tokens) - 1) // TOKENS
    inputs, targets = (tokens[k : k + count * TOKENS].reshape(count, TOKENS) for k in (0, 1))
    return halves(
        inputs,
        targets,
        name="descriptions",
        vocabulary=len(alphabet),
        objective=objective("sequence"),
    )


def segmentation() -> fl.Dataset:
    """Return noisy digits; their labels are the pixels that belong to the digit."""
    images = torch.from_numpy(load_digits().images).float() / 16
    noise = 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    shown = (images + noise).unsqueeze(1)
    return halves(
        shown, (images > 0.5).long(), name="digits", classes=2, objective=objective("segmentation")
    )


def objective(name: str) -> Objective:
    built: Objective = objectives.build(name)
    return built


def pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))


def in_one_place(task: fl.Task) -> float:
    """Return the metric of the task's initial model after plain SGD on all clients' samples."""
    module, settings = copy.deepcopy(task.model).train(), task.training
    optimizer = torch.optim.SGD(module.parameters(), settings.learning_rate)
    samples = task.train[torch.from_numpy(task.partition.indices)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(ROUNDS * EPOCHS):
        for chosen in torch.randperm(len(samples), generator=generator).split(
            settings.batch_size or len(samples)
        ):
            batch = samples[chosen]
            optimizer.zero_grad()
            task.objective.loss(module(task.dataset.prepare(batch.inputs)), batch.labels).backward()
            optimizer.step()
    evaluator = Evaluator(task.model, task.layout, task.dataset)
    return evaluator.score(task.layout.flatten(module), task.test)[task.objective.metric.name]


def by_scikit_learn(task: fl.Task) -> float:
    """Return the metric of scikit-learn's linear model on the same samples; NaN if it has none."""
    (x, y), (inputs, truth) = (
        (task.dataset.prepare(split.inputs).flatten(1).numpy(), split.labels.numpy())
        for split in (task.train[torch.from_numpy(task.partition.indices)], task.test)
    )
    match task.objective.metric.name:
        case "accuracy":
            return float(
                accuracy_score(truth, LogisticRegression(max_iter=2000).fit(x, y).predict(inputs))
            )
        case "rmse":
            return float(
                root_mean_squared_error(truth, LinearRegression().fit(x, y).predict(inputs))
            )
        case "f1":
            fitted = OneVsRestClassifier(LogisticRegression(max_iter=2000)).fit(x, y)
            return float(f1_score(truth, fitted.predict(inputs), average="micro"))
    return math.nan


def main() -> None:
    torch.set_num_threads(1)
    text = sequence()
    cases: list[tuple[str, str | fl.Dataset, str | nn.Module, float]] = [
        ("classification", "digits", "logistic", 0.1),
        ("multilabel", multilabel(), "logistic", 0.5),
        ("regression", "diabetes", "logistic", 0.02),
        ("sequence", text, nn.Embedding(text.vocabulary or 0, text.vocabulary or 0), 10.0),
        ("segmentation", segmentation(), pixels(), 0.1),
    ]
    for name, data, model, rate in cases:
        training = fl.Training(learning_rate=rate, batch_size=20, epochs=EPOCHS)
        task = fl.make_task(data, clients=CLIENTS, partition="iid", model=model, training=training)
        result = fl.run("fedavg", task, rounds=ROUNDS, participation=1.0, evaluate_every=ROUNDS)
        metric = task.objective.metric
        figures = [result.score, in_one_place(task), by_scikit_learn(task)]
        shown = [
            f"{metric.text(figure)}{metric.unit}" if figure == figure else "-" for figure in figures
        ]
        print(
            f"| `{name}` | {task.dataset.name} | {metric.noun} | {' | '.join(shown)} |", flush=True
        )


if __name__ == "__main__":
    main()
