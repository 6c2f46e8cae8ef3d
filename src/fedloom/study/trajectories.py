"""The trajectories of one client's models with several methods, in one plane over one surface of
its loss (FedALA, figure 4).

trajectories.json    in the folder of the page that shows them: the drawing, and the digest of the records it was made from
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedloom.errors import CheckpointError
from fedloom.recording.recorder import RunContext
from fedloom.recording.run_recording import RESULT, recorded_tensors
from fedloom.recording.trajectory import Trajectory, principal_plane, surroundings
from fedloom.report.summary import RunSummary
from fedloom.rounds.evaluation import newcomers_last
from fedloom.rounds.scoring import Evaluator
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import read_json, write_json
from fedloom.state.digest import Digest

FILE = "trajectories.json"

Run = tuple[Path, RunSummary]
"""A run of one setting, and its directory."""


def draw_joint_trajectories(
    folder: Path, runs: Sequence[Run], context: Callable[[int], RunContext]
) -> None:
    """Write the joint trajectories of these runs to `folder`, unless they are there.

    All models of a client that the methods recorded with one seed span the plane; its surface has
    the mean of their buffers.
    """
    groups = _groups(runs)
    if not groups or _stored(folder, groups) is not None:
        return
    seed = next(iter(groups.values()))[0][1].seed
    drawn = [_in_one_plane(client, group, context(seed)) for client, group in groups.items()]
    write_json(
        folder / FILE,
        {"of": _digest(groups), "trajectories": [entry for entry in drawn if entry is not None]},
    )


def with_joint_trajectories(folder: Path, runs: Sequence[Run]) -> list[RunSummary]:
    """Return the summaries of the runs, with the joint trajectories that `folder` holds of just
    these runs.
    """
    summaries, groups = [run for _, run in runs], _groups(runs)
    stored = _stored(folder, groups)
    if not stored:
        return summaries
    owner = next(iter(groups.values()))[0][1]
    return [
        dataclasses.replace(run, recorded=[*run.recorded, *stored]) if run is owner else run
        for run in summaries
    ]


def context_of(configuration: Configuration, seed: int) -> RunContext:
    """Return what recorders saw of a run with this configuration and seed."""
    schedule, full_task = configuration.seeded(seed), configuration.task(seed)
    newcomers = schedule.newcomers(full_task.clients)
    task, numbers = newcomers_last(full_task, newcomers, seed)
    evaluator = Evaluator(task.model, task.layout, task.dataset)
    return RunContext(task, schedule.rounds, task.clients - newcomers, numbers, evaluator)


def _groups(runs: Sequence[Run]) -> dict[int, list[Run]]:
    """Return the runs of the first seed with which several methods recorded a client's trajectory,
    by client.
    """
    groups: dict[tuple[int, int], list[Run]] = {}
    for path, run in runs:
        for entry in run.recorded:
            if entry["kind"] == "trajectory":
                groups.setdefault((run.seed, entry["client"]), []).append((path, run))
    several = {key: group for key, group in groups.items() if len(group) > 1}
    first = next((seed for seed, _ in several), None)
    return {client: group for (seed, client), group in several.items() if seed == first}


def _stored(folder: Path, groups: Mapping[int, Sequence[Run]]) -> list[dict[str, Any]] | None:
    """Return the trajectories in the folder; None where there are none, or they are of other runs."""
    try:
        content = read_json(folder / FILE, dict)
    except CheckpointError:
        return None
    entries = content.get("trajectories")
    return (
        entries
        if groups and isinstance(entries, list) and content.get("of") == _digest(groups)
        else None
    )


def _digest(groups: Mapping[int, Sequence[Run]]) -> str:
    digest = Digest()
    for client, group in groups.items():
        for path, run in group:
            digest.update(
                f"{client} {run.algorithm} {run.seed}\n".encode() + (path / RESULT).read_bytes()
            )
    return digest.hexdigest()


def _in_one_plane(client: int, group: Sequence[Run], context: RunContext) -> dict[str, Any] | None:
    """Return the trajectories of a client's models with all these methods; None where the models
    span no plane.
    """
    entries = [
        next(
            entry
            for entry in run.recorded
            if entry["kind"] == "trajectory" and entry["client"] == client
        )
        for _, run in group
    ]
    name = Trajectory(client).name
    models = [
        [recorded_tensors(path, name, number) for number in entry["rounds"]]
        for (path, _), entry in zip(group, entries, strict=True)
    ]
    rows = torch.stack([tensors["model"] for states in models for tensors in states])
    plane = principal_plane(rows[:, : context.task.layout.trainable].cpu())
    if plane is None:
        return None
    points = plane.points.split([len(states) for states in models])
    methods = {
        run.algorithm: {
            "rounds": entry["rounds"],
            "losses": entry["losses"],
            "points": coordinates.tolist(),
        }
        for (_, run), entry, coordinates in zip(group, entries, points, strict=True)
    }
    grid = max(len(entry.get("x", ())) for entry in entries) or Trajectory.grid
    mean, integers = rows.double().mean(0).to(rows), models[0][-1].get("integers")
    around = surroundings(plane, grid, mean, integers, client, context)
    return {
        "kind": "trajectories",
        "client": client,
        "seed": group[0][1].seed,
        "methods": methods,
        **around,
    }
