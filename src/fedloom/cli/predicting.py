"""`fedloom predict` and `fedloom export`: use of a trained model."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import TrustCode, option

Run = Annotated[Path, typer.Argument(metavar="RUN", hidden=True)]
Data = Annotated[Path, typer.Argument(metavar="FILE", hidden=True)]
To = Annotated[
    Path | None,
    typer.Option("--to", metavar="OUT", help="A .csv, .parquet or .npz file; else CSV to stdout."),
]
Client = Annotated[
    int | None,
    typer.Option("--client", metavar="N", help="Use the personal model of client N."),
]
Probabilities = Annotated[
    bool, typer.Option("--probabilities", help="Also write the probability of each class.")
]
Tokens = Annotated[
    int, option(metavar="N", help="Most tokens to generate after each text, 100 by default.")
]
FORMATS = ("onnx", "torch", "safetensors")
"""Formats of exported models, for the completion of a command line."""


def complete_format(incomplete: str) -> list[str]:
    """Return the formats that begin with a text."""
    return [name for name in FORMATS if name.startswith(incomplete)]


Formats = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="onnx, torch or safetensors.",
        show_default=False,
        autocompletion=complete_format,
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="The file; else exported.* in RUN.")
]


def predict(
    run: Run,
    file: Data,
    to: To = None,
    client: Client = None,
    probabilities: Probabilities = False,
    tokens: Tokens = 100,
    trust_code: TrustCode = False,
) -> None:
    """Predict new samples with the model of a finished run.

    RUN is the folder of the run. FILE is a .csv or .parquet file with the columns of the training
    data in any order; a picture or a folder of pictures; a .txt file with one text per line; or an
    .npz file with the array inputs. Predictions follow the columns of FILE.
    """
    from fedloom.serving.prediction_files import predict_file
    from fedloom.serving.predictor import load

    predictor = load(run, client=client, trust_code=trust_code)
    count = predict_file(predictor, file, to, probabilities=probabilities, tokens=tokens)
    if to is not None:
        print(f"{count} predictions: {to}", file=sys.stderr)


def export(
    run: Run,
    to: Formats = "onnx",
    output: Output = None,
    client: Client = None,
    trust_code: TrustCode = False,
) -> None:
    """Export the model of a finished run, checked on the same samples, for another program.

    RUN is the folder of the run. The file contains the preprocessing as JSON in its metadata; ONNX
    needs the extra `onnx`.
    """
    from fedloom.common.fields import require_one_of
    from fedloom.serving.exporting import SUFFIXES
    from fedloom.serving.predictor import load

    require_one_of("--to", to, tuple(SUFFIXES))
    predictor = load(run, client=client, trust_code=trust_code)
    print(predictor.export(to, output))  # type: ignore[arg-type]
