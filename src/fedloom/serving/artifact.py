"""The final model as a file: its tensors by name, and its architecture to build it again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedloom.common.errors import CheckpointError, FedloomError, InvalidValue, quoted
from fedloom.common.randomness import preserved_generator
from fedloom.data.dataset import DataSpec
from fedloom.models import models
from fedloom.models.build import build_model
from fedloom.models.structure import copied
from fedloom.state.tensors import read_tensors, write_tensors

MODEL = "model.safetensors"
PREPROCESSING = "preprocessing.json"
PERSONAL = "personal.safetensors"


def save_model(
    path: Path, module: nn.Module, expression: str, spec: DataSpec, about: Mapping[str, str]
) -> None:
    """Write a module's tensors and architecture: the same bytes for the same module.

    Args:
        path: The file.
        module: The model.
        expression: Expression that builds the model; empty for the user's module.
        spec: Shapes of the data.
        about: Further metadata.
    """
    tensors = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    architecture = {
        "model": expression,
        "shape": " ".join(map(str, spec.shape)),
        "classes": str(spec.outputs),
        "vocabulary": "" if spec.vocabulary is None else str(spec.vocabulary),
    }
    write_tensors(path, tensors, {**about, **architecture})


def load_model(
    path: str | Path, module: nn.Module | None = None, *, trust_code: bool = False
) -> nn.Module:
    """Read the model of a finished run.

    Args:
        path: A `model.safetensors`, or the run's directory.
        module: A module of this architecture, for your own model; it is copied. A registered model
            is built by the name in the file.
        trust_code: Import your own model by its path in the file, such as `my_models:small`. This
            runs the code of the module. Without it, a file never decides which code runs.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: The file is missing or damaged, or does not fit the module.
    """
    path = Path(path)
    path = path / MODEL if path.is_dir() else path
    tensors, metadata = read_tensors(path)
    try:
        built = _built(metadata, tensors, trust_code) if module is None else copied(module)
        built.load_state_dict(tensors)
    except (FedloomError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the model cannot be built again: {' '.join(str(error).split())}"
        ) from None
    return built.eval()


def kept_model(folder: Path, number: int) -> Path:
    """Return the file of the global model of a round, which `keep_models` saves.

    Args:
        folder: The folder of the run.
        number: Number of the round, from 1.

    Returns:
        The path of the file, which may not exist.
    """
    return folder / "models" / f"round-{number:07d}.safetensors"


def load_row(folder: Path, client: int) -> Tensor:
    """Read the personal model `[P]` of a client.

    Args:
        folder: The folder of the run.
        client: Number of the client in the task.

    Returns:
        All weights of the model in one vector, `[P]`, on the CPU.

    Raises:
        InvalidValue: The run has no such model.
    """
    path = folder / PERSONAL
    rows = read_tensors(path)[0] if path.is_file() else {}
    if str(client) not in rows:
        clients = (
            ", ".join(rows) or "none: methods such as ditto write them if the task has local_test"
        )
        raise InvalidValue(
            f"client={client}: {folder} has no such personal model (there are: {clients})"
        )
    return rows[str(client)]


def _built(
    metadata: Mapping[str, str], tensors: Mapping[str, Tensor], trust_code: bool
) -> nn.Module:
    """Return the model that a file names, if it matches the file's tensors.

    A few bytes may name a model of any size, so it is first made without memory. With `trust_code`,
    the path of a user's model is imported.
    """
    expression = metadata["model"]
    name = expression.partition("(")[0]
    own = ":" in name
    if name not in models and not (own and trust_code):
        remedy = "give it as module=..., since a file runs no code"
        if own:
            remedy = "trust_code=True (--trust-code) imports it, or give it as module=..."
        raise CheckpointError(f"its model is your own ({expression}): {remedy}")
    vocabulary = int(metadata["vocabulary"]) if metadata["vocabulary"] else None
    spec = DataSpec(
        tuple(map(int, metadata["shape"].split())), int(metadata["classes"]), vocabulary
    )
    if own:
        return build_model(expression, spec, 0)
    entry, options = models.read(expression)
    if "folder" not in entry.parameters:  # a model of transformers is as large as its files
        parameters = max(1000, 4 * len(tensors))
        with preserved_generator(), torch.device("meta"), _at_most(parameters):
            shapes = entry.make(spec, **options).state_dict()
        _require_shapes(shapes, tensors, expression)
    return build_model(expression, spec, 0)


def _require_shapes(
    named: Mapping[str, Tensor], stored: Mapping[str, Tensor], expression: str
) -> None:
    """Raise `CheckpointError` for the first tensor that is missing in one, or differs in shape."""
    for name in sorted(named.keys() | stored.keys()):
        shapes = [
            list(tensors[name].shape) if name in tensors else "missing"
            for tensors in (stored, named)
        ]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"tensor {quoted(name)} is {shapes[0]} in the file and {shapes[1]} in "
                f"{quoted(expression)}"
            )


@contextmanager
def _at_most(parameters: int) -> Iterator[None]:
    """Raise `InvalidValue` if modules made in this block have more than `parameters` parameters."""
    count = 0

    def counted(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        nonlocal count
        count += 1
        if count > parameters:
            raise InvalidValue(f"it has more than {parameters} parameters, its file has fewer")

    hook = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()
