"""`fedloom predict`, `fedloom evaluate` and `fedloom export`: use of a trained model."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import TrustCode, option
from fedloom.common.errors import InvalidValue, quoted

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
By = Annotated[
    str, option(metavar="COLUMN", help="Column that names the client of each row; of several files "
                                       "their names.")
]  # fmt: skip
Metrics = Annotated[
    str, option(metavar="NAMES", help="Metrics to show, such as auc,f1; all by default.")
]
Positive = Annotated[
    str, option(metavar="CLASS", help="Of two classes the one that auc and f1 are about.")
]
Limit = Annotated[
    str, option(metavar="P", help="Probability from which on the positive class is predicted, or "
                                  "best-f1.")
]  # fmt: skip
Worst = Annotated[
    int, option(metavar="N", help="Rows with the highest loss to list, 10 by default.")
]
ToJson = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write everything as JSON.")
]
ToCsv = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Also write the metrics as CSV.")
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


def evaluate(
    run: Run,
    file: Data,
    by: By = "",
    metrics: Metrics = "",
    positive: Positive = "",
    threshold: Limit = "",
    worst: Worst = 10,
    client: Client = None,
    to_json: ToJson = None,
    to_csv: ToCsv = None,
    trust_code: TrustCode = False,
) -> None:
    """Show metrics of a finished model on rows whose answers are known.

    RUN is the folder of the run. FILE is a .csv or .parquet file with the columns of the training
    data, the target included, or a folder with one file per client.
    """
    from fedloom.serving.labelled_files import evaluate_file
    from fedloom.serving.predictor import load

    outputs = {".json": to_json, ".csv": to_csv}
    for ending, path in outputs.items():
        if path is not None and path.suffix != ending:
            raise InvalidValue(f"--{ending[1:]} {path}: the name must end in {ending}")
    result = evaluate_file(
        load(run, client=client, trust_code=trust_code),
        file,
        by,
        metrics=[name.strip() for name in metrics.split(",") if name.strip()],
        positive=positive,
        threshold=_threshold(threshold),
        worst=worst,
    )
    print(result)
    for path in outputs.values():
        if path is not None:
            result.save(path)
            print(f"written: {path}")


def _threshold(text: str) -> float | str | None:
    """Return the number in a text, `best_f1`, or None for an empty text."""
    if not text or text in ("best-f1", "best_f1"):
        return "best_f1" if text else None
    try:
        return float(text)
    except ValueError:
        raise InvalidValue(f"--threshold {quoted(text)} is not a probability or best-f1") from None
