"""Export of a trained model to other formats, checked on the same samples."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedloom.common.errors import InvalidValue, MissingExtra, first_line, import_extra
from fedloom.data.preprocessing import PictureInputs, Preprocessing
from fedloom.objectives import prediction
from fedloom.state.files import replacing
from fedloom.state.tensors import write_tensors

Format = Literal["onnx", "torch", "safetensors"]

SUFFIXES: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}

_TOLERANCE = 1e-3  # of outputs, relative to the largest


class Deployed(nn.Module):
    """The model from the result of `Preprocessing.apply` to its outputs.

    The outputs of a regression are in the target's units.
    """

    shift: Tensor
    scale: Tensor
    offset: Tensor
    unit: Tensor

    def __init__(self, module: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.module = module
        inputs = preprocessing.inputs
        outputs = preprocessing.outputs
        self.pictures = isinstance(inputs, PictureInputs)
        self.numbers = bool(outputs.mean)
        # An exporter writes buffers as constants.
        if isinstance(inputs, PictureInputs):
            self.register_buffer("shift", torch.tensor(inputs.mean or (0.0,)).view(-1, 1, 1))
            self.register_buffer("scale", torch.tensor(inputs.deviation or (1.0,)).view(-1, 1, 1))
        self.register_buffer("offset", torch.tensor(outputs.mean or (0.0,)))
        self.register_buffer("unit", torch.tensor(outputs.deviation or (1.0,)))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.pictures:
            inputs = (inputs.float() / 255 - self.shift) / self.scale
        outputs = prediction(self.module(inputs))
        return outputs * self.unit + self.offset if self.numbers else outputs


def export(module: nn.Module, preprocessing: Preprocessing, to: Format, path: str | Path) -> Path:
    """Write a model for another program, with its preprocessing as JSON in the file's metadata.

    Args:
        module: The model, in evaluation mode.
        preprocessing: Its preprocessing.
        to: `onnx` for any runtime of ONNX; `torch` for `torch.export.load`, which does not need the
            model's class; `safetensors` for the tensors by name.
        path: The file.

    Returns:
        The file.

    Raises:
        InvalidValue: The model cannot be written in this format, or gives other outputs there.
        MissingExtra: The extra `onnx` is not installed.
    """
    path = Path(path)
    metadata = {"preprocessing": preprocessing.to_json()}
    if to == "safetensors":
        tensors = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
        write_tensors(path, tensors, metadata)
        return path
    deployed = Deployed(module, preprocessing).eval().cpu()
    inputs = example(preprocessing)
    with replacing(path) as temporary, warnings.catch_warnings(action="ignore"), torch.no_grad():
        try:
            batch = {0: torch.export.Dim("batch", min=1, max=1 << 20)}
            program = torch.export.export(deployed, (inputs,), dynamic_shapes=(batch,))
            run = _onnx(program, temporary, metadata) if to == "onnx" else program.module()
            if to == "torch":
                torch.export.save(program, temporary, extra_files=metadata)
        except MissingExtra:
            raise
        except Exception as error:  # PyTorch's exporter raises many kinds
            raise InvalidValue(
                f"the model cannot be exported to {to}: {first_line(error)}"
            ) from error
        for rows in (inputs, inputs[:1]):
            expected = deployed(rows)
            difference = float(
                (run(rows) - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
            )
            if not difference <= _TOLERANCE:
                raise InvalidValue(
                    f"the outputs of the model in {to} differ by {difference:.2g} of the "
                    "largest output"
                )
    return path


def example(preprocessing: Preprocessing) -> Tensor:
    """Return five random samples in the form of the result of `Preprocessing.apply`."""
    generator = torch.Generator().manual_seed(0)
    shape = (5, *preprocessing.shape)
    if preprocessing.dtype.is_floating_point:
        return torch.randn(shape, generator=generator)
    words = getattr(preprocessing.inputs, "words", ())  # of a text
    most = 256 if preprocessing.dtype == torch.uint8 else len(words) + 2
    return torch.randint(0, most, shape, generator=generator, dtype=preprocessing.dtype)


def _onnx(program: Any, path: Path, metadata: dict[str, str]) -> Callable[[Tensor], Tensor]:
    """Write a program as ONNX, and return a function that runs it with onnxruntime."""
    packages = ("onnx", "onnxruntime", "onnxscript")
    onnx, runtime, _ = (import_extra(package, "onnx", "export to ONNX") for package in packages)
    names: dict[str, Any] = {"input_names": ["inputs"], "output_names": ["outputs"]}
    with _without_torchvision():
        written: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    model = written.model_proto
    onnx.helper.set_model_props(model, metadata)
    onnx.save_model(model, str(path))
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda rows: torch.from_numpy(session.run(["outputs"], {"inputs": rows.numpy()})[0])


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Drop the warnings of PyTorch's exporter about operators of torchvision.

    It lists every operator that onnxscript can translate, and warns once for each operator of
    torchvision if that package is not installed. A model with such an operator needs the package
    before it can be exported.
    """

    def concerns_others(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("torchvision is not installed")

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    logger.addFilter(concerns_others)
    try:
        yield
    finally:
        logger.removeFilter(concerns_others)
