"""Runnable Flower app for a configuration: `fedloom flower init`. Its files are those in `app/`, with the blanks filled in."""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

import tomli_w

from fedloom import __version__
from fedloom.algorithms.building import build
from fedloom.algorithms.secure_recombination import Secure
from fedloom.data.columns import TableInputs
from fedloom.data.preprocessing import PictureInputs, TextInputs
from fedloom.errors import DataError, InvalidValue
from fedloom.experiment.configuration import Configuration, configuration, put, read_table
from fedloom.sites.site_data import table_roles
from fedloom.task import make_dataset

_LONGEST = 32  # of an app's name, to Flower

_TEMPLATE = files("fedloom.sites") / "app"

EXAMPLE = (_TEMPLATE / "example.toml").read_text(encoding="utf-8")
"""The configuration of an app that is made without one: three sites share scikit-learn's handwritten digits."""

_PATHS = {"project.toml": "pyproject.toml", "readme.md": "README.md", "gitignore": ".gitignore"}  # where each file goes

_DATA = "federation/data.py"

_PEERS = """
`identity` and `peers` say who the site is and who the others are, with whom it exchanges layers; the list must not come to it
through the server, and is a new one when sites are added."""

# Keys of a configuration that say something of comparisons or of one machine, not of the run over sites.
_ELSEWHERE = ("algorithms", "seeds", "settings", "workers", "engine", "directory")


@dataclass(frozen=True)
class App:
    """A Flower app that was written to `folder`: its name, what it trains, and how many sites it is for."""

    folder: Path
    name: str
    configuration: Configuration

    @property
    def sites(self) -> int:
        return self.configuration.data.clients


def write_app(folder: Path, file: Path | None = None, overrides: Sequence[str] = ()) -> App:
    """Write the app that trains the configuration in `file` (or else `EXAMPLE`), changed by `overrides`, into `folder`.

    Raises `InvalidValue` for a folder whose name Flower does not take, a configuration that is not one or names no method,
    and for files that are there already; nothing is written then.
    """
    name = folder.resolve().name
    if not re.fullmatch(rf"[A-Za-z][A-Za-z0-9-]{{0,{_LONGEST - 1}}}", name):
        raise InvalidValue(
            f"folder {name!r} must have a name of letters, figures and hyphens that begins with a letter, "
            f"at most {_LONGEST} characters: Flower calls the app so"
        )
    text = _configuration_text(file, overrides)
    app = App(folder, name, configuration({"name": name, **tomllib.loads(text)}))
    contents = _contents(app, text)
    taken = [path for path in contents if (folder / path).exists()]
    if taken:
        raise InvalidValue(f"{folder / taken[0]} is there already: choose another folder, or remove it first")
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")
    return app


def _configuration_text(file: Path | None, overrides: Sequence[str]) -> str:
    """Return a TOML text that names one method: the file's own where that is enough."""
    table = tomllib.loads(EXAMPLE) if file is None else read_table(file)
    for override in overrides:
        put(table, override)
    checked = configuration(table)
    if checked.algorithm is None:
        table["algorithm"] = checked.only_method("train")
    elif not overrides:
        return EXAMPLE if file is None else file.read_text(encoding="utf-8")
    return tomli_w.dumps({key: value for key, value in table.items() if key not in _ELSEWHERE})


def _contents(app: App, configuration_text: str) -> dict[str, str]:
    """Return the text of every file of the app, by its path there."""
    sites, method = app.sites, app.configuration.algorithm
    summary = f"{app.configuration.model} with {method} for {app.configuration.schedule.rounds} rounds"
    secure = any(isinstance(nested, Secure) for nested in build(str(method)).nested())
    blanks = {
        "name": app.name,
        "folder": app.folder.name or app.name,
        "version": __version__,
        "summary": f"`{app.configuration.model}` by `{method}`",
        "description": tomli_w.dumps({"description": f"{summary} over {sites} sites"}).strip(),
        "sites": str(sites),
        "last": str(sites - 1),
        "identity": " identity='keys/site-0/site.key' peers='keys/site-0/peers.pub'" if secure else "",
        "peers": _PEERS if secure else "",
        "configuration": f"configuration = {_literal(configuration_text.strip())}",
    }
    kind, path, values = _data_blanks(app.configuration)
    blanks |= {"path": path, **values}
    texts = {
        path: (_TEMPLATE / name).read_text(encoding="utf-8") for name, path in {**_PATHS, f"{kind}.txt": _DATA}.items()
    }
    return {"federation/__init__.py": "", **{path: Template(text).substitute(blanks) for path, text in texts.items()}}


def _data_blanks(plan: Configuration) -> tuple[str, str, dict[str, str]]:
    """Return the template of a site's data that fits a configuration, the path of data that needs no function, and the blanks."""
    roles = table_roles(plan)
    try:
        dataset = make_dataset(plan.data.name)
    except (DataError, InvalidValue):  # the data are elsewhere
        return (
            _table_blanks(roles.inputs, roles.target)
            if roles
            else ("arrays", "/srv/data.npz", {"shape": "(1,)", "dtype": "float32"})
        )
    match dataset.preprocessing.inputs:
        case TableInputs(columns=columns):
            return _table_blanks([column.name for column in columns], dataset.target)
        case TextInputs(column=column):
            return _table_blanks([column or "text"], dataset.target or "label")
        case PictureInputs(shape=(channels, height, width)):
            sizes = {"mode": "L" if channels == 1 else "RGB", "width": str(width), "height": str(height)}
            return "pictures", "/srv/pictures", {"classes": _texts(dataset.preprocessing.outputs.classes), **sizes}
    dtype = str(dataset.train.inputs.dtype).removeprefix("torch.")
    return "arrays", "/srv/data.npz", {"shape": repr(dataset.spec.shape), "dtype": dtype}


def _table_blanks(columns: Sequence[str], target: str) -> tuple[str, str, dict[str, str]]:
    return "table", "/srv/data.csv", {"columns": _texts(columns), "target": _texts([target])}


def _texts(names: Sequence[str]) -> str:
    return ", ".join(map(json.dumps, names))


def _literal(text: str) -> str:
    """Return a text as a value in TOML; as it stands, where nothing in it would end it."""
    if "'''" not in text and all(letter.isprintable() or letter in "\n\t" for letter in text):
        return f"'''\n{text}\n'''"
    return tomli_w.dumps({"text": text}).removeprefix("text = ").strip()
