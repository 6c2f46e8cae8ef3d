"""Reads and writes traces for `fedloom paper referee`, with only NumPy and safetensors.

Copy this file into your project.

A trace is a folder:

    recorded.jsonl                      one line per round: the clients that trained, in order,
                                        and their numbers of samples
    recorded/round-0000001.safetensors  the tensors of round 1, each with the name
                                        steps/CLIENT/STAGE/ROLE/TENSOR

STAGE is `in` or `out` (received and sent tensors; ROLE is `model`, or the name in the method), or
the number of a local step, from 0. A step has the ROLEs `before` and `after` (the weights),
`samples` (the positions of the batch in the training data) and `loss` (their mean loss). CLIENT is
a number, or `server` with STAGE `end`: its state after the round. TENSOR is a name in the model's
state_dict; scalars and samples have none. Missing tensors are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Arrays = dict[str, NDArray[Any]]


class TraceWriter:
    """Writes a trace: call `add` for received and sent tensors, then `end` after each round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "recorded").mkdir(parents=True)
        self.arrays: Arrays = {}

    def add(
        self, client: int | str, stage: int | str, role: str, value: Mapping[str, Any] | Any
    ) -> None:
        """Add named tensors, such as a state_dict, or a single array."""
        name = f"steps/{client}/{stage}/{role}"
        named = value.items() if isinstance(value, Mapping) else [("", value)]
        self.arrays |= {
            f"{name}/{key}".rstrip("/"): np.asarray(array).copy() for key, array in named
        }

    def end(self, number: int, clients: list[int], sizes: list[int]) -> None:
        """Write round `number`, from 1."""
        save_file(self.arrays, self.folder / "recorded" / f"round-{number:07d}.safetensors")
        line = {"round": number, "values": {"steps": {"clients": clients, "sizes": sizes}}}
        with (self.folder / "recorded.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.arrays = {}


def read_trace(folder: Path) -> Iterator[tuple[int, list[int], list[int], Arrays]]:
    """Yield each round of a trace: number, clients, their numbers of samples, tensors by name."""
    for text in (folder / "recorded.jsonl").read_text().splitlines():
        line = json.loads(text)
        value = line["values"]["steps"]
        arrays = load_file(folder / "recorded" / f"round-{line['round']:07d}.safetensors")
        yield (
            line["round"],
            value["clients"],
            value["sizes"],
            {name[6:]: array for name, array in arrays.items()},
        )


def tensors_of(arrays: Arrays, client: int | str, stage: int | str, role: str) -> Arrays:
    """Return the tensors of a role by their names in the model."""
    prefix = f"{client}/{stage}/{role}/"
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
