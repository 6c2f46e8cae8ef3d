"""The trajectories of one client's models with several methods, in one plane over one surface of
its loss (FedALA, figure 4).

trajectories.json    in the folder of the page: the drawing, and the digest of its records
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedloom.common.digest import Digest
from fedloom.common.errors import CheckpointError
from fedloom.recording.recorder import RunContext
from fedloom.recording.run_recording import RESULT, recorded_tensors
from fedloom.recording.trajectory import Trajectory, principal_plane, surroundings
from fedloom.rounds.evaluation import newcomers_last
from fedloom.rounds.scoring import Evaluator
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import read_json, write_json
from fedloom.study.stored_runs import StoredRun

FILE = "trajectories.json"

Groups = Mapping[int, Sequence[StoredRun]]
"""Runs that recorded the trajectory of a client, by its number."""


def draw_joint_trajectories(
    folder: Path, runs: Sequence[StoredRun], context: Callable[[int], RunContext]
) -> None:
    """Write the joint trajectories of the runs of one setting, unless the folder holds them.

    All models of a client that the methods recorded with one seed span the plane. Its surface has
    the mean of their buffers.

    Args:
        folder: Folder of the setting's page.
        runs: The runs.
        context: Returns what recorders saw of a run with a seed.
    """
    groups = _groups(runs)
    if not groups or _stored(folder, groups) is not None:
        return
    seed = next(iter(groups.values()))[0].summary.seed
    drawn = [_in_one_plane(client, group, context(seed)) for client, group in groups.items()]
    entries = [entry for entry in drawn if entry is not None]
    write_json(folder / FILE, {"of": _digest(groups), "trajectories": entries})


def with_joint_trajectories(folder: Path, runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the runs of one setting.

    The first has the joint trajectories of the folder, if they belong to these runs.

    Args:
        folder: Folder of the setting's page.
        runs: Runs of the setting.

    Returns:
        Copies of the runs in their order; the records in their directories stay unchanged.
    """
    groups = _groups(runs)
    stored = _stored(folder, groups)
    if not stored:
        return list(runs)
    owner = next(iter(groups.values()))[0]
    recorded = [*owner.summary.recorded, *stored]
    summary = dataclasses.replace(owner.summary, recorded=recorded)
    return [dataclasses.replace(run, summary=summary) if run is owner else run for run in runs]


def context_of(configuration: Configuration, seed: int) -> RunContext:
    """Return the context that recorders had in a run with this configuration and seed.

    Args:
        configuration: Configuration of the run.
        seed: Seed of the run.

    Returns:
        The context, with a task that is made again. New clients are its last ones.
    """
    schedule, full_task = configuration.seeded(seed), configuration.task(seed)
    newcomers = schedule.newcomers(full_task.clients)
    task, numbers = newcomers_last(full_task, newcomers, seed)
    evaluator = Evaluator(task.model, task.layout, task.dataset)
    return RunContext(task, schedule.rounds, task.clients - newcomers, numbers, evaluator)


def _groups(runs: Sequence[StoredRun]) -> Groups:
    """Return the runs of the first seed with which several methods recorded a client's
    trajectory.
    """
    groups: dict[tuple[int, int], list[StoredRun]] = {}
    for run in runs:
        for entry in run.summary.recorded:
            if entry["kind"] == "trajectory":
                groups.setdefault((run.summary.seed, entry["client"]), []).append(run)
    several = {key: group for key, group in groups.items() if len(group) > 1}
    first_seed = next((seed for seed, _ in several), None)
    return {client: group for (seed, client), group in several.items() if seed == first_seed}


def _stored(folder: Path, groups: Groups) -> list[dict[str, Any]] | None:
    """Return the trajectories in the folder, or None if they are missing or of other runs."""
    try:
        content = read_json(folder / FILE, dict)
    except CheckpointError:
        return None
    entries = content.get("trajectories")
    if not groups or not isinstance(entries, list) or content.get("of") != _digest(groups):
        return None
    return entries


def _digest(groups: Groups) -> str:
    digest = Digest()
    for client, group in groups.items():
        for run in group:
            digest.update(f"{client} {run.summary.algorithm} {run.summary.seed}\n".encode())
            digest.update((run.path / RESULT).read_bytes())
    return digest.hexdigest()


def _in_one_plane(
    client: int, group: Sequence[StoredRun], context: RunContext
) -> dict[str, Any] | None:
    """Return the trajectories of a client's models with all these methods; None where the models
    span no plane.
    """
    name, entries, models = Trajectory(client).name, {}, []
    for run in group:
        recorded = run.summary.recorded
        entry = next(e for e in recorded if (e["kind"], e.get("client")) == ("trajectory", client))
        entries[run.summary.algorithm] = entry
        models.append([recorded_tensors(run.path, name, number) for number in entry["rounds"]])
    rows = torch.stack([tensors["model"] for states in models for tensors in states])
    plane = principal_plane(rows[:, : context.task.layout.trainable].cpu())
    if plane is None:
        return None
    points = plane.points.split(list(map(len, models)))
    methods = {
        method: {"rounds": entry["rounds"], "losses": entry["losses"], "points": way.tolist()}
        for (method, entry), way in zip(entries.items(), points, strict=True)
    }
    grid = max(len(entry.get("x", ())) for entry in entries.values()) or Trajectory.grid
    mean, integers = rows.double().mean(0).to(rows), models[0][-1].get("integers")
    around = surroundings(plane, grid, mean, integers, client, context)
    seed = group[0].summary.seed
    return {"kind": "trajectories", "client": client, "seed": seed, "methods": methods, **around}
