"""`fedloom check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import Overrides
from fedloom.errors import InvalidValue

if TYPE_CHECKING:
    from fedloom.experiment.check import Checked

What = Annotated[str, typer.Argument(metavar="METHOD|FILE.toml", hidden=True)]


def check(what: What, overrides: Overrides = None) -> None:
    """Try a method in a few tiny rounds, and say what is wrong with it.

    METHOD is a name, a class of your own, or an expression: my_methods:HalfStep, "umf(my_methods:HalfStep(step=0.9))".
    FILE.toml is a configuration, whose methods are tried on a small part of its task; KEY=VALUE changes one of its keys.
    Each finding names the line and how to mend it. The exit code is 1 where there are any.
    """
    from fedloom.experiment.check import examine
    from fedloom.experiment.configuration import load

    if what.endswith(".toml"):
        configuration = load(Path(what), overrides or [])
        if not configuration.methods:
            raise InvalidValue("no method to check: give algorithm=..., such as algorithm=fedmr")
        task = configuration.task(configuration.seed)
        found = [examine(method, task) for method in configuration.methods]
    elif overrides:
        raise InvalidValue(f"{overrides[0]!r} changes a configuration, but {what!r} is a method: give a file.toml")
    else:
        found = [examine(what)]
    for one in found:
        _show(one)
    if any(one.findings for one in found):
        raise typer.Exit(1)


def _show(found: Checked) -> None:
    from fedloom.report.units import byte_text

    count = len(found.findings)
    print(f"{found.method}: {f'{count} to mend' if count else 'nothing to mend'}")
    for finding in found.findings:
        print(f"  {finding.place or 'somewhere'}: {finding.what}")
        if finding.remedy:
            print(f"      {finding.remedy}")
    if found.sizes:
        print(f"  {', '.join(f'{name}: {byte_text(size)}' for name, size in found.sizes.items())}")
