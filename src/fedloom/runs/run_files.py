"""The files of a run that only its beginning and its end write."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import Tensor

from fedloom.engines.base import Choice, LocalEngine
from fedloom.engines.rows import RowsEngine
from fedloom.report.card import model_card
from fedloom.rounds.federation import Federation
from fedloom.runs.directory import SITES, RunDirectory, read_json, write_json
from fedloom.runs.finished_round import trained_module
from fedloom.runs.identity import task_digests
from fedloom.runs.result import Result, described_data
from fedloom.serving.artifact import kept_model, save_model
from fedloom.state.files import write_text
from fedloom.state.store import BUDGET
from fedloom.state.tensors import write_tensors
from fedloom.task import Task


def write_start(task: Task, path: Path, choice: Choice) -> None:
    """Write the facts about the task, the split over clients, and the engine of a rule.

    Args:
        task: The task.
        path: Directory of the run.
        choice: The engine, with the reason of the rule.
    """
    if not choice.named:
        write_json(path / "engine.json", dataclasses.asdict(choice))
    if not task.elsewhere:
        task.partition.save(path / "split.npz")
        if task.local_test is not None:
            task.local_test.save(path / "test-split.npz")
    if task.true_labels is not None:
        write_tensors(
            path / "labels.safetensors", {"given": task.train.labels, "true": task.true_labels}, {}
        )
    write_json(path / "task.json", {**described_data(task), "digests": task_digests(task)})


def write_end(result: Result, directory: RunDirectory, model: str) -> None:
    """Write the recorders' results and the model, and last the figures, which mark the run as
    finished.

    Args:
        result: The finished run.
        directory: Directory of the run.
        model: Expression of the model, from which the saved model can be built again.
    """
    task = result.task
    summary = result.summary
    if result.recording is not None:
        result.recording.write(result.recorded)
    about = {"algorithm": summary.algorithm, "seed": str(summary.seed), "data": task.dataset.name}
    save_model(directory.path / "model.safetensors", result.model, model, task.dataset.spec, about)
    if personal := _personal_models(result.federation):
        write_tensors(directory.path / "personal.safetensors", personal, {})
    preprocessing = task.dataset.preprocessing
    write_text(directory.path / "preprocessing.json", preprocessing.to_json())
    write_text(
        directory.path / "model-card.md",
        model_card(summary, preprocessing, model, described_data(task) | _counted(directory.path)),
    )
    directory.finish(result.final_metrics)


def _counted(path: Path) -> dict[str, int]:
    """Return the training samples of a run over real sites, also those beyond a site's limit."""
    claimed = read_json(path / SITES, dict).get("claimed") if (path / SITES).exists() else None
    return {} if claimed is None else {"train_samples": claimed}


def write_kept(result: Result, folder: Path, number: int, model: str) -> None:
    """Write the global model of a round, as `keep_models` wants it.

    Args:
        result: The run so far.
        folder: Folder of the run.
        number: Number of the round.
        model: Expression of the model, or the name of its class.
    """
    task = result.task
    module = trained_module(task, result.federation.model(), result.federation.integers)
    path = kept_model(folder, number)
    path.parent.mkdir(exist_ok=True)
    save_model(path, module, model, task.dataset.spec, {"round": str(number)})


def _personal_models(federation: Federation) -> dict[str, Tensor]:
    """Return the model `[P]` that each evaluated client would use, by its number, of personalised
    methods in a simulation.
    """
    task = federation.task
    engine = federation.engine
    evaluation = federation.evaluation
    size = task.initial.nbytes * (len(evaluation.clients) + len(evaluation.newcomers))
    measured = evaluation.personal_every and federation.pipeline.personal and size <= BUDGET
    if not measured or not isinstance(engine, LocalEngine):
        return {}
    rows = RowsEngine(task)
    rows.store = engine.store
    return {
        str(number): rows.personalised(federation.pipeline, upcoming, [job])[0][1].clone()
        for number, upcoming, job in federation.personal_tasks()
    }
