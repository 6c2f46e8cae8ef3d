"""Facts of a federation over sites that are fixed at its start."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fedloom.common.errors import CheckpointError, InvalidValue
from fedloom.common.fields import checked
from fedloom.rounds.replies import capped
from fedloom.state.files import read_file, write_text

_logger = logging.getLogger("flwr.fedloom")


@dataclass(frozen=True)
class Opening:
    """Facts of a federation that are fixed at its start and hold for all rounds.

    Attributes:
        federation: Name of the federation at the sites.
        own: True if the sites have their own data.
        samples: Training samples of each site; None if it was not connected.
        tests: Test samples of each site; None if it was not connected.
        claimed: Training samples that the sites reported, in all; None in older files.
        preprocessing: The columns on which tables agree, as JSON.
    """

    federation: str
    own: bool
    samples: list[int | None]
    tests: list[int | None]
    preprocessing: str | None = None
    claimed: int | None = None

    @classmethod
    def read(cls, path: Path, count: int) -> "Opening | None":
        """Read the opening in a file; None if the file does not exist.

        Args:
            path: The file that `write` made.
            count: Number of sites of the federation. An opening with another number is refused.

        Returns:
            The opening, or None for a missing file.

        Raises:
            CheckpointError: The file cannot be read.
        """
        if not path.exists():
            return None
        try:
            opening = cls(**checked(cls, json.loads(read_file(path))))
            if len(opening.samples) == len(opening.tests) == count:
                return opening
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, InvalidValue):
            pass
        raise CheckpointError(f"{path} is damaged or of another run: use another folder")

    def write(self, path: Path) -> None:
        """Write the opening to a file."""
        write_text(path, json.dumps(asdict(self)) + "\n")


def credited(claims: Mapping[int, int], count: int, share: float) -> list[int | None]:
    """Return the numbers of samples that `count` sites count with (`capped`).

    Args:
        claims: Samples that sites claim, by number.
        count: Number of sites.
        share: Largest share of one site.

    Returns:
        A number for each site; None for sites without a claim.
    """
    taken = (
        capped(torch.tensor(list(claims.values()), dtype=torch.int64), share)
        .double()
        .round()
        .long()
        .tolist()
    )
    counted: dict[int, int] = dict(zip(claims, taken, strict=True))
    for number, claim in claims.items():
        if counted[number] < claim:
            text = f"site {number} claims {claim} samples and counts with {counted[number]}"
            _logger.warning("%s (largest_share = %g)", text, share)
    return [counted.get(number) for number in range(count)]
