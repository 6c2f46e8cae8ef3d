"""`fedloom check` and `fedloom paper referee`."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import Overrides, option
from fedloom.common.errors import InvalidValue, one_line

Subject = Annotated[str, typer.Argument(metavar="METHOD|FILE.toml", hidden=True)]


def check(subject: Subject, overrides: Overrides = None) -> None:
    """Test a method in a few tiny rounds, and report its mistakes.

    METHOD is a name, your own class, or an expression: my_methods:HalfStep,
    "umf(my_methods:HalfStep(step=0.9))". FILE.toml is a configuration; its methods are tested on a
    small part of its task, and KEY=VALUE changes one of its keys. Each finding names the line and a
    remedy. The exit code is 1 if there are findings.
    """
    from fedloom.report.units import byte_text
    from fedloom.reviews.checker.check import examine
    from fedloom.runs.config_file import load

    if subject.endswith(".toml"):
        configuration = load(Path(subject), overrides or [])
        if not configuration.methods:
            raise InvalidValue("no method to check: give algorithm=..., such as algorithm=fedmr")
        results = []
        for name in configuration.methods:
            task = configuration.of(name).task(configuration.seed)
            results.append(examine(str(configuration.method(name)), task))
    elif overrides:
        raise InvalidValue(
            f"{overrides[0]!r} changes a configuration, but {subject!r} is a method: give a "
            "file.toml"
        )
    else:
        results = [examine(subject)]
    for result in results:
        count = len(result.findings)
        print(f"{result.method}: {f'{count} to fix' if count else 'nothing to fix'}")
        for finding in result.findings:
            print(f"  {finding.location or 'unknown line'}: {finding.problem}")
            if finding.remedy:
                print(f"      {finding.remedy}")
        if result.sizes:
            sizes = (f"{name}: {byte_text(size)}" for name, size in result.sizes.items())
            print(f"  {', '.join(sizes)}")
    if any(result.findings for result in results):
        raise typer.Exit(1)


def referee(
    a: Annotated[Path, typer.Argument(metavar="A", hidden=True)],
    b: Annotated[Path, typer.Argument(metavar="B", hidden=True)],
    tolerance: Annotated[
        float, option(help="Allowed difference as a share of a tensor's change, 0.001 by default.")
    ] = 1e-3,
) -> None:
    """Find where another implementation of a method differs from fedloom's.

    A and B are traces: a run with record=["steps"], and the trace of the other program. The first
    round, client, step and tensor that differ are named, with frequent causes. The exit code is 1
    if the traces differ.
    """
    from fedloom.reviews.evidence.referee import compare
    from fedloom.reviews.evidence.trace import Trace

    traces = Trace(a), Trace(b)
    single = {
        f"{k.stage}/{k.role}"
        for k in traces[0].keys() ^ traces[1].keys()
        if not k.stage.isdecimal()
    }
    if single:
        print(f"not compared, since only one has it: {one_line(', '.join(sorted(single)))}")
    if difference := compare(*traces, tolerance):
        print(
            f"they differ in {one_line(difference[0])}\n  {one_line(difference[1])}",
            "frequent causes:",
            *map(one_line, difference[2:]),
            sep="\n  ",
        )
        raise typer.Exit(1)
    print(f"the same: {len(traces[0].keys() & traces[1].keys()):,} tensors")
