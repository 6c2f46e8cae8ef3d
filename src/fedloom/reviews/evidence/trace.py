"""Traces: inputs and outputs of each round, client and local step, as the recorder `steps` or
another program writes them.

recorded.jsonl                        a line a round:
                                      {"round": 1, "values":
                                       {"steps": {"clients": [4, 0], "sizes": [60, 31]}}}
recorded/round-0000001.safetensors    its tensors: `steps/4/0/after/fc.weight` is client 4, step 0,
                                      a role and a tensor
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fedloom.common.errors import DataError, first_line
from fedloom.recording.run_recording import models_file
from fedloom.rounds.checkpoint import RoundLog

Array = NDArray[Any]


class Key(NamedTuple):
    """A tensor: round, client (or `server`), local step (or `in`, `out`, `end`), its role there,
    its name in the model or "".
    """

    round: int
    client: str
    stage: str
    role: str
    tensor: str = ""


class Trace(dict[Key, Array]):
    """The tensors of the trace in a folder, floats as float64, and the clients of each round.
    Raises `DataError` without any.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "recorded.jsonl"
        self.clients = dict[int, list[str]]()
        try:
            for line in (line for line in RoundLog(path).read() if line["values"].get("steps")):
                self.clients[line["round"]] = [
                    str(int(client)) for client in line["values"]["steps"]["clients"]
                ]
                path = models_file(folder, line["round"])
                with safe_open(path, framework="np") as file:
                    names = [name for name in list(file.keys()) if name.startswith("steps/")]
                    for name in names:
                        array = file.get_tensor(name)
                        key = Key(line["round"], *name.split("/", 4)[1:])
                        self[key] = array.astype(np.float64) if array.dtype.kind == "f" else array
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path} is no file of a trace ({first_line(error)})") from None
        if not self.clients:
            raise DataError(
                f'{folder} holds no trace: record=["steps"] writes one, or recorded.jsonl and '
                "its tensors do"
            )

    def steps(self, round: int, client: str) -> list[str]:
        """Return the numbers of a client's local steps, in order.

        Args:
            round: Number of the round.
            client: Number of the client as text.

        Returns:
            The numbers as text, ascending.
        """
        return sorted(
            {k.stage for k in self if k[:2] == (round, client) and k.stage.isdecimal()}, key=int
        )

    def earlier(self, key: Key) -> Array | None:
        """Return the tensor before it moved to where it is; None where that is not known."""
        if key.role == "after":
            return self.get(key._replace(role="before"))
        number = key.round
        client = self.clients[key.round][0] if key.client == "server" else key.client
        if key.stage == "in":
            number = max((number for number in self.clients if number < key.round), default=0)
            client = self.clients.get(number, [""])[0]
        return self.get(
            Key(number, client, "in", "model" if key.role == "before" else key.role, key.tensor)
        )

    def vector(
        self, round: int, client: str, stage: str, role: str, names: Iterable[str]
    ) -> Array | None:
        """Return tensors of a role as one vector.

        Args:
            round: Number of the round.
            client: Number of the client as text, or `server`.
            stage: `in`, the number of a local step, `out` or `end`.
            role: Role of the tensors, such as `model`, `before` or `after`.
            names: Names of the tensors, in the order of the vector.

        Returns:
            The numbers of all tensors, `[P]`; None if one is missing.
        """
        arrays = [self.get(Key(round, client, stage, role, name)) for name in names]
        vectors = [np.ravel(array) for array in arrays if array is not None]
        return np.concatenate(vectors) if vectors and len(vectors) == len(arrays) else None

    def way(self, round: int, client: str, stage: str, names: Iterable[str]) -> Array | None:
        """Return the change of the parameters in a local step.

        Args:
            round: Number of the round.
            client: Number of the client as text.
            stage: Number of the step as text, or `out` for all of local training.
            names: Names of the parameters, in the order of the vector.

        Returns:
            The change, `[P]`; None if a tensor is missing.
        """
        bounds = (
            (("in", "model"), ("out", "model"))
            if stage == "out"
            else ((stage, "before"), (stage, "after"))
        )
        start, end = (self.vector(round, client, *bound, names) for bound in bounds)
        return None if start is None or end is None else end - start
