"""Runnable Flower app for a configuration: `fedloom flower init`.

Its files are the templates in `app/` with their blanks filled in.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from string import Template

import tomli_w
import torch

from fedloom import __version__
from fedloom.common.errors import DataError, InvalidValue
from fedloom.data.columns import TableInputs
from fedloom.data.dataset import make_dataset
from fedloom.data.preprocessing import PictureInputs, TextInputs
from fedloom.runs.config_file import configuration, put, read_table, single_method
from fedloom.runs.configuration import Configuration
from fedloom.sites.site_tables import table_roles

_LONGEST = 32  # characters of an app's name in Flower

_TEMPLATE = files("fedloom.sites") / "app"

EXAMPLE = (_TEMPLATE / "example.toml").read_text(encoding="utf-8")
"""Configuration of an app without one: three sites share scikit-learn's handwritten digits."""

# paths of the files in the app
_PATHS = {"project.toml": "pyproject.toml", "readme.md": "README.md", "gitignore": ".gitignore"}

_DATA = "federation/data.py"

# Keys of a configuration that apply only to comparisons or to one machine, not to sites.
_ELSEWHERE = ("algorithms", "seeds", "settings", "workers", "engine", "directory")


def write_app(
    folder: Path, file: Path | None = None, overrides: Sequence[str] = ()
) -> Configuration:
    """Write an app into a folder.

    Nothing is written if an error is raised.

    Args:
        folder: The folder; its name is the name of the app.
        file: Configuration of the federation; None takes `EXAMPLE`.
        overrides: Changes of the configuration, `key=value`.

    Returns:
        The configuration of the app.

    Raises:
        InvalidValue: Flower does not accept the folder's name, the configuration is not valid or
            has no method, or a file exists already.
    """
    name = folder.resolve().name
    if not re.fullmatch(rf"[A-Za-z][A-Za-z0-9-]{{0,{_LONGEST - 1}}}", name):
        rule = (
            "letters, digits and hyphens, begin with a letter "
            f"and have at most {_LONGEST} characters"
        )
        raise InvalidValue(f"folder {name!r}, the name of the app, must consist of {rule}")
    text = _configuration_text(file, overrides)
    plan = configuration({"name": name, **tomllib.loads(text)})
    contents = _contents(name, plan, text)
    if taken := [path for path in contents if (folder / path).exists()]:
        raise InvalidValue(
            f"{folder / taken[0]} already exists: choose another folder, or remove it first"
        )
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")
    return plan


def _configuration_text(file: Path | None, overrides: Sequence[str]) -> str:
    """Return a TOML text with one method; the file's text if that is enough."""
    table = tomllib.loads(EXAMPLE) if file is None else read_table(file)
    for override in overrides:
        put(table, override)
    checked = configuration(table)
    if checked.algorithm is None or "methods" in table:
        name = checked.only_method("train")
        table = single_method(table, checked, name, checked.own.get(name, {}))
    elif not overrides:
        return EXAMPLE if file is None else file.read_text(encoding="utf-8")
    return tomli_w.dumps({key: value for key, value in table.items() if key not in _ELSEWHERE})


def _contents(name: str, plan: Configuration, text: str) -> dict[str, str]:
    """Return the text of every file of the app, by its path there."""
    sites = plan.data.clients
    method = str(plan.algorithm)
    summary = f"{plan.model} with {method} for {plan.schedule.rounds} rounds over {sites} sites"
    blanks = {
        "name": name,
        "version": __version__,
        "summary": f"`{plan.model}` by `{method}`",
        "description": tomli_w.dumps({"description": summary}).strip(),
        "configuration": f"configuration = {_literal(text.strip())}",
    }
    kind, values = _data_blanks(plan)
    names = {**_PATHS, f"{kind}.txt": _DATA}
    texts = {path: (_TEMPLATE / name).read_text(encoding="utf-8") for name, path in names.items()}
    filled = {path: Template(text).substitute(blanks | values) for path, text in texts.items()}
    return {"federation/__init__.py": "", **filled}


def _data_blanks(plan: Configuration) -> tuple[str, dict[str, str]]:
    """Return the template of a site's data that fits a configuration, and its blanks."""
    roles = table_roles(plan)
    dataset = None
    with suppress(DataError, InvalidValue):  # the data may be only at the sites
        dataset = make_dataset(plan.data.name)
    columns, target = (roles.inputs, roles.target) if roles and dataset is None else (None, "")
    if dataset is not None:
        target = dataset.target or "label"
        match dataset.preprocessing.inputs:
            case TableInputs(columns=table):
                columns = [column.name for column in table]
            case TextInputs(column=column):
                columns = [column or "text"]
            case PictureInputs(shape=(channels, height, width)):
                sizes = {
                    "mode": "L" if channels == 1 else "RGB",
                    "width": str(width),
                    "height": str(height),
                }
                classes = _texts(dataset.preprocessing.outputs.classes)
                return "pictures", {"path": "/srv/pictures", "classes": classes, **sizes}
    if columns is not None:
        return "table", {
            "path": "/srv/data.csv",
            "columns": _texts(columns),
            "target": _texts([target]),
        }
    shape, dtype = (
        (dataset.spec.shape, dataset.train.inputs.dtype) if dataset else ((1,), torch.float32)
    )
    return "arrays", {
        "path": "/srv/data.npz",
        "shape": repr(shape),
        "dtype": f"{dtype}".removeprefix("torch."),
    }


def _texts(names: Sequence[str]) -> str:
    return ", ".join(map(json.dumps, names))


def _literal(text: str) -> str:
    """Return a text as a TOML value: in literal quotes unless it contains their end."""
    if "'''" not in text and all(letter.isprintable() or letter in "\n\t" for letter in text):
        return f"'''\n{text}\n'''"
    return tomli_w.dumps({"text": text}).removeprefix("text = ").strip()
