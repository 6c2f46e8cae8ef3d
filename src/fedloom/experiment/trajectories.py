"""The trajectories of one client's models with several methods, in one plane over one surface of its loss (FedALA, figure 4).

trajectories.json    in the folder of the page that shows them: what is drawn, and the digest of the records it was made of
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import CheckpointError
from fedloom.experiment.configuration import Configuration
from fedloom.experiment.directory import read_json, write_json
from fedloom.recording.plane import principal_plane
from fedloom.recording.recorder import RunContext
from fedloom.recording.run_recording import RESULT, kept_file
from fedloom.recording.trajectory import Trajectory, surroundings
from fedloom.report.summary import RunSummary
from fedloom.rounds.evaluation import newcomers_last
from fedloom.rounds.scoring import Evaluator
from fedloom.state.tensors import read_tensors

FILE = "trajectories.json"

Run = tuple[Path, RunSummary]
"""A run of one setting, and where it lies."""


def draw_together(folder: Path, runs: Sequence[Run], context: Callable[[int], RunContext]) -> None:
    """Keep in `folder` what is to be drawn of these runs together.

    All models of a client that the methods recorded with one seed span the plane (`principal_plane`); its surface is as of one
    trajectory (`Trajectory`), the floating-point buffers the mean of all these models'. `context` is that of a seed, and asked
    for only where two methods recorded the same client's trajectory and that is not kept yet.
    """
    groups = _groups(runs)
    if not groups or _known(folder, groups) is not None:
        return
    seed = next(iter(groups.values()))[0][1].seed
    found = [
        one for client, group in groups.items() if (one := _in_one_plane(client, group, context(seed))) is not None
    ]
    write_json(folder / FILE, {"of": _digest(groups), "trajectories": found})


def together(folder: Path, runs: Sequence[Run]) -> list[RunSummary]:
    """The summaries of the runs, with what is kept in `folder` to be drawn together where it is of just these runs."""
    summaries, groups = [run for _, run in runs], _groups(runs)
    known = _known(folder, groups)
    if not known:
        return summaries
    first = next(iter(groups.values()))[0][1]
    return [
        dataclasses.replace(run, recorded=[*run.recorded, *known]) if run is first else run for run in summaries
    ]  # fmt: skip


def context_of(told: Configuration, seed: int) -> RunContext:
    """What recorders saw of a run with this configuration and seed."""
    schedule, whole = dataclasses.replace(told.schedule, seed=seed), told.task(seed)
    newcomers = schedule.newcomers(whole.clients)
    task, numbers = newcomers_last(whole, newcomers, seed)
    evaluator = Evaluator(task.model, task.layout, task.dataset)
    return RunContext(task, schedule.rounds, task.clients - newcomers, numbers, evaluator)


def _groups(runs: Sequence[Run]) -> dict[int, list[Run]]:
    """Of the first seed with which two methods or more recorded a client's trajectory, one of them long enough to span a plane
    by itself: these runs, by client."""
    for seed in dict.fromkeys(run.seed for _, run in runs):
        clients: dict[int, list[Run]] = {}
        for place, run in runs:
            for one in run.recorded:
                if run.seed == seed and one["kind"] == "trajectory":
                    clients.setdefault(one["client"], []).append((place, run))
        found = {
            client: group
            for client, group in clients.items()
            if len(group) > 1 and any("points" in _entry(run, client) for _, run in group)
        }
        if found:
            return found
    return {}


def _known(folder: Path, groups: Mapping[int, Sequence[Run]]) -> list[dict[str, Any]] | None:
    """What is kept in the folder of these runs; None where nothing is, or where it is of others."""
    try:
        kept = read_json(folder / FILE, dict)
    except CheckpointError:
        return None
    return list(kept["trajectories"]) if groups and kept.get("of") == _digest(groups) else None


def _digest(groups: Mapping[int, Sequence[Run]]) -> str:
    digest = hashlib.sha256()
    for client, group in groups.items():
        for place, run in group:
            digest.update(f"{client} {run.algorithm} {run.seed}\n".encode() + (place / RESULT).read_bytes())
    return digest.hexdigest()


def _in_one_plane(client: int, group: Sequence[Run], context: RunContext) -> dict[str, Any] | None:
    """The trajectories of a client's models with all these methods; None where the models span no plane."""
    entries = [_entry(run, client) for _, run in group]
    models = [_models(place, one["rounds"], client) for (place, _), one in zip(group, entries, strict=True)]
    rows = torch.stack([one["model"] for found in models for one in found])
    plane = principal_plane(rows[:, : context.task.layout.trainable].cpu())
    if plane is None:
        return None
    points = plane.points.split([len(found) for found in models])
    methods = {
        run.algorithm: {"rounds": one["rounds"], "losses": one["losses"], "points": own.tolist()}
        for (_, run), one, own in zip(group, entries, points, strict=True)
    }
    grid = len(next((one["x"] for one in entries if "x" in one), range(Trajectory.grid)))
    integers = models[0][-1].get("integers")
    around = surroundings(plane, grid, rows.double().mean(0).to(rows), integers, client, context)
    seed = group[0][1].seed
    return {"kind": "trajectories", "client": client, "seed": seed, "methods": methods, **around}


def _entry(run: RunSummary, client: int) -> Mapping[str, Any]:
    return next(one for one in run.recorded if one["kind"] == "trajectory" and one["client"] == client)


def _models(place: Path, rounds: Sequence[int], client: int) -> list[dict[str, Tensor]]:
    """The client's models of these rounds. Raises `DamagedCheckpoint` when one cannot be read."""
    prefix = f"{Trajectory(client).name}/"
    files = (read_tensors(kept_file(place, number), round=str(number))[0] for number in rounds)
    return [{n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)} for tensors in files]
