"""Predictions of a trained model for new rows, arrays, pictures and texts.

They are in the classes and units of the data.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import require_at_least, require_one_of
from fedloom.data.convert import BOOLEANS
from fedloom.data.formats.limits import read_text
from fedloom.data.formats.words import END
from fedloom.data.preprocessing import Preprocessing, TextInputs, label_type
from fedloom.flat.layout import Layout
from fedloom.objectives import prediction
from fedloom.serving.artifact import MODEL, PREPROCESSING, kept_model, load_model, load_row
from fedloom.serving.exporting import SUFFIXES, Format, export
from fedloom.serving.row_evaluation import (
    RowEvaluation,
    Threshold,
    class_numbers,
    labelled,
    require_lengths,
    row_evaluation,
    true_numbers,
)
from fedloom.serving.row_scores import ClassAnswers, NumberAnswers
from fedloom.state.tensors import read_tensors

_BATCH = 500

_logger = logging.getLogger("fedloom")


def load(
    path: str | Path,
    *,
    module: nn.Module | None = None,
    client: int | None = None,
    trust_code: bool = False,
    round: int | None = None,
) -> "Predictor":
    """Load the model of a finished run with its preprocessing.

    Nothing in the folder runs code, unless `trust_code` is set.

    Args:
        path: The run's directory, such as `runs/mine/fedavg/seed-0`, or the folder of an experiment
            with one run.
        module: A module of the architecture, for your own model.
        client: Number of the client to load the personal model of; by default the global model.
        trust_code: Import your own model by its path, such as `my_models:small(width=8)`. The path
            is in the file of the model, so set it only for runs that you trust.
        round: Number of a round whose global model was saved by `keep_models`, or, with `client`,
            whose model of this client was recorded by `client_models`; by default the last round.

    Returns:
        The model, ready to predict.

    Raises:
        CheckpointError: No run is finished, or a file is damaged.
        InvalidValue: The client or the round has no model, or the folder contains several runs.
    """
    folder = run_folder(Path(path))
    file = folder / MODEL
    if round is not None and client is None:
        file = _kept(folder, round)
    model = load_model(file, module, trust_code=trust_code)
    if client is not None and round is None:
        Layout(model).load(model, load_row(folder, client))
    elif client is not None and round is not None:
        Layout(model).load(model, *_recorded(folder, client, round))
    path = folder / PREPROCESSING
    preprocessing = Preprocessing.from_json(read_text(path), str(path))
    return Predictor(model.eval(), preprocessing, folder)


def _kept(folder: Path, number: int) -> Path:
    """Return the file of the global model of a round."""
    file = kept_model(folder, number)
    if not file.is_file():
        rounds = [int(path.stem.partition("-")[2]) for path in sorted(file.parent.glob("round-*"))]
        listed = ", ".join(map(str, rounds)) or "none: set keep_models"
        raise InvalidValue(f"round={number}: {folder} has no such model (there are: {listed})")
    return file


def _recorded(folder: Path, client: int, number: int) -> tuple[Tensor, Tensor | None]:
    """Return the recorded model `[P]` of a client in a round, and its integer buffers."""
    file = folder / "recorded" / kept_model(folder, number).name
    tensors = read_tensors(file)[0] if file.is_file() else {}
    name = f"client_models/{client}"
    if f"{name}/model" not in tensors:
        raise InvalidValue(
            f"client={client}, round={number}: {folder} has no such model; record "
            f"client_models(clients=[{client}], rounds=[{number}])"
        )
    return tensors[f"{name}/model"], tensors.get(f"{name}/integers")


def run_folder(path: Path) -> Path:
    """Return the directory of the only finished run in a folder.

    Raises:
        InvalidValue: The folder contains no finished run, or several.
    """
    runs = [path / MODEL] if (path / MODEL).is_file() else sorted(path.glob(f"**/seed-*/{MODEL}"))
    if len(runs) != 1:
        listed = ", ".join(str(run.parent) for run in runs[:5]) or "none"
        raise InvalidValue(f"{path} must be or contain one finished run (there are: {listed})")
    return runs[0].parent


@dataclass(frozen=True)
class Predictor:
    """A trained model with the preprocessing of its data.

    Attributes:
        module: The bare model, in evaluation mode.
        preprocessing: Transforms user data to the model's inputs, and its outputs to answers.
        folder: Folder of the run; the current folder for a model without a run.
    """

    module: nn.Module
    preprocessing: Preprocessing
    folder: Path = Path()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of the outputs; empty for other predictions."""
        return self.preprocessing.outputs.classes

    def predict(self, data: Any) -> npt.NDArray[Any]:
        """Return the prediction for each sample.

        Args:
            data: A table of pandas, Polars or Arrow with the columns of the training data in any
                order, or an array. For pictures, the path of a file or several paths; for text,
                texts.

        Returns:
            Depends on the objective. Classification: the class of each sample `[n]`, by its name
                (integers or booleans if the labels were). Several labels: 0 or 1 for each class
                `[n, classes]`. Regression: numbers in the target's units, `[n]` or `[n, d]`. Tokens
                and pixels: the class at every position. Otherwise: the model's outputs.

        Raises:
            DataError: A column is missing or of another type, a cell is empty, or a picture is
                unreadable.
            InvalidValue: An array has another shape.
        """
        return self.answers(self.outputs(data))

    def answers(self, outputs: Tensor) -> npt.NDArray[Any]:
        """Return the predictions for the model's outputs, as in `predict`."""
        answer = self.preprocessing.outputs.answer
        if answer == "class":
            kind = self.preprocessing.outputs.label_type or label_type(self.classes)
            names: npt.NDArray[Any] = np.array(self.classes)[outputs.argmax(1).numpy()]
            if kind == "boolean":
                is_true: npt.NDArray[Any] = names == BOOLEANS[1]
                return is_true
            return names.astype(np.int64) if kind == "number" else names
        if answer == "classes":
            outputs = (outputs > 0).long()
        elif answer in ("token", "pixel"):
            outputs = outputs.argmax(2 if answer == "token" else 1)
        elif answer == "number" and outputs.dim() == 2 and outputs.shape[1] == 1:
            outputs = outputs[:, 0]
        values: npt.NDArray[Any] = outputs.numpy()
        return values

    def predict_proba(self, data: Any) -> npt.NDArray[Any]:
        """Return the probability of each class, `[n, classes]` in the order of `classes`.

        Args:
            data: As for `predict`.

        Raises:
            InvalidValue: The model predicts no classes.
        """
        return self.probabilities(self.outputs(data))

    def probabilities(self, outputs: Tensor) -> npt.NDArray[Any]:
        """Return the probabilities for the model's outputs, as in `predict_proba`."""
        answer = self.preprocessing.outputs.answer
        if answer not in ("class", "classes"):
            raise InvalidValue(
                "predict_proba is for classes, which this model does not predict: call `predict`"
            )
        probabilities: npt.NDArray[Any] = (
            outputs.softmax(1) if answer == "class" else outputs.sigmoid()
        ).numpy()
        return probabilities

    def evaluate(
        self,
        data: Any,
        labels: Any = None,
        *,
        by: str | Sequence[str] = "",
        metrics: Sequence[str] = (),
        positive: str = "",
        threshold: Threshold = None,
        worst: int = 10,
    ) -> RowEvaluation:
        """Return metrics of the model on rows whose answers are known.

        Args:
            data: A table with the columns of the training data, the target included; or other data
                as for `predict`, with `labels`.
            labels: The answers `[n]`, if they are not the target column of the table.
            by: The column that names the client of each row, or these names `[n]`, for metrics of
                each client too.
            metrics: Names of metrics, by default all: `accuracy`, `balanced_accuracy`, `auc`, `f1`,
                `log_loss` and `calibration_error` of classes; `rmse`, `mae` and `r2` of numbers.
            positive: Of two classes, the one that `auc`, `f1` and `threshold` are about; by default
                the second.
            threshold: Of two classes, the probability from which on the positive class is
                predicted. `best_f1` takes the one with the highest F1 score on these rows. By
                default the class with the higher probability is predicted.
            worst: Number of rows with the highest loss that are listed.

        Returns:
            The metrics: `frame()` is a table, `save("figures.json")` writes everything.

        Raises:
            DataError: A column is missing, or a label is empty or no class of the model.
            InvalidValue: A name is unknown, or the model predicts neither classes nor numbers.
        """
        outputs = self.preprocessing.outputs
        if outputs.answer not in ("class", "number"):
            raise InvalidValue("evaluate is for models that predict one class or a number")
        rows, truth, clients = labelled(data, labels, by, outputs.name)
        predicted = self.outputs(rows)
        require_lengths(len(predicted), truth, clients)
        answers: ClassAnswers | NumberAnswers
        if outputs.answer == "number":
            values = predicted.double().reshape(len(predicted), -1)[:, 0].numpy()
            answers = NumberAnswers(true_numbers(truth, outputs), values)
        else:
            if positive:
                require_one_of("positive", positive, outputs.classes)
            chosen = outputs.classes.index(positive) if positive else 1
            shares = predicted.double().softmax(1).numpy()
            best = shares.argmax(1)
            answers = ClassAnswers(class_numbers(truth, outputs), shares, best, chosen)
        return row_evaluation(
            answers, outputs, clients, metrics=metrics, threshold=threshold, worst=worst
        )

    @torch.no_grad()
    def outputs(self, data: Any, source: str = "data") -> Tensor:
        """Return the model's outputs for each sample: logits, or numbers in the target's units.

        Args:
            data: As for `predict`.
            source: Name of the data, for errors.

        Returns:
            Outputs `[n, ...]` on the CPU: `[n, classes]` for classes.

        Raises:
            InvalidValue: The data are empty.
            DataError: The data do not fit the model.
        """
        inputs, notices = self.preprocessing.apply(data, source)
        if not len(inputs):
            raise InvalidValue(f"{source}: no samples to predict")
        for notice in notices:
            _logger.warning(notice)
        parameter = next(self.module.parameters(), torch.empty(0))
        blocks = []
        for batch in inputs.split(_BATCH):
            batch = self.preprocessing.prepare(batch.to(parameter.device))
            batch = batch.to(parameter.dtype) if batch.is_floating_point() else batch
            # a copy, since the model may change it in place
            blocks.append(prediction(self.module(batch.clone())).cpu())
        return self.preprocessing.outputs.in_units(torch.cat(blocks).float())

    def export(self, to: Format = "onnx", path: str | Path | None = None) -> Path:
        """Write the model for another program, checked on the same samples.

        Args:
            to: `onnx`, `torch` or `safetensors`.
            path: The file; by default `exported.onnx` in the folder of the run, or with the suffix
                of another format.

        Returns:
            The file.

        Raises:
            InvalidValue: The model cannot be written in this format, or gives other outputs there.
            MissingExtra: The extra `onnx` is not installed.
        """
        require_one_of("to", to, tuple(SUFFIXES))
        file = self.folder / f"exported{SUFFIXES[to]}" if path is None else path
        return export(self.module, self.preprocessing, to, file)

    @torch.no_grad()
    def generate(
        self, text: str, tokens: int = 100, *, temperature: float = 0.0, seed: int = 0
    ) -> str:
        """Return a text and its continuation by a model of the next token.

        The continuation ends before the token that ends the texts of the training data, if they
        have one.

        Args:
            text: The beginning.
            tokens: Largest number of tokens that follow, at least 1.
            temperature: 0 takes the most likely token; higher values draw more freely.
            seed: The seed of the draws.

        Returns:
            The text, with the continuation at its end.

        Raises:
            InvalidValue: The model predicts no tokens of a text.
        """
        encoding = self.preprocessing.inputs
        if not isinstance(encoding, TextInputs) or self.preprocessing.outputs.answer != "token":
            raise InvalidValue(
                "generate is for models of the next token, such as models of shakespeare"
            )
        require_at_least("tokens", tokens, 1)
        require_at_least("temperature", temperature, 0)
        generator = torch.Generator().manual_seed(seed)
        numbers = encoding.tokens(text)
        if not numbers:
            raise InvalidValue("generate needs a text to begin with")
        ends = encoding.numbers.get(END)
        begun = len(numbers)
        for _ in range(tokens):
            window = torch.tensor([numbers[-encoding.length :]])
            # only words: not the padding, not the unknown word, no further tokens of a larger model
            logits = prediction(self.module(window))[0, -1, 2 : len(encoding.words) + 2].float()
            chances = (logits / temperature).softmax(0) if temperature else logits
            drawn = (
                torch.multinomial(chances, 1, generator=generator)
                if temperature
                else chances.argmax()
            )
            if int(drawn) + 2 == ends:
                break
            numbers.append(int(drawn) + 2)
        return text + encoding.text(numbers[begun:])
