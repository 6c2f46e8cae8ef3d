"""`fedloom run` and `fedloom compare`."""

from __future__ import annotations

from typing import Any

from fedloom.cli.shared import Failed, File, Fresh, Overrides, Quiet, again, patient, shown, use_threads
from fedloom.errors import InvalidValue


def run(file: File, overrides: Overrides = None, fresh: Fresh = False, quiet: Quiet = False) -> None:
    """Train one method with one seed.

    FILE.toml is the configuration; KEY=VALUE changes one of its keys, such as algorithm=fedmr or training.learning_rate=0.1.
    The same command goes on after an interruption.
    """
    from fedloom.experiment.configuration import load
    from fedloom.experiment.events import RunName
    from fedloom.experiment.run import run_configured, run_directory
    from fedloom.expression import parse
    from fedloom.report import summary as figures
    from fedloom.report import write_report
    from fedloom.report.tables import byte_text, time_text

    configuration = load(file, overrides or [])
    listed = configuration.algorithms
    algorithm = configuration.algorithm or (listed[0] if len(listed) == 1 else None)
    if algorithm is None:
        choice = f"the file compares {', '.join(map(repr, listed))}" if listed else "such as algorithm=fedmr"
        raise InvalidValue(f"no method to run: give algorithm=..., {choice}")
    name = RunName(str(parse(algorithm)), configuration.seed)
    place = run_directory(configuration, algorithm, configuration.seed)
    use_threads(configuration)
    with shown(1, configuration.schedule.rounds, quiet) as watch, patient(watch) as stopped:

        def passing(event: Any) -> None:
            watch(event)
            if stopped():
                raise KeyboardInterrupt

        found = run_configured(configuration, name, passing, fresh=fresh)
    page = place.path / "report.html"
    if fresh or not page.exists():
        write_report(page, str(name), [found], configuration.targets, again(["run", str(file), *(overrides or [])]))
    final, best, seconds = figures.final(found), figures.best(found), figures.seconds(found)
    print(f"{name}: test accuracy {100 * (final or 0):.2f} %, best {100 * (best or 0):.2f} %")
    print(f"{len(found.records)} rounds, {byte_text(figures.bytes_down(found))} down, ", end="")
    print(f"{byte_text(figures.bytes_up(found))} up, {time_text(seconds or 0)}")
    print(f"model:  {place.path / 'model.safetensors'}\nreport: {page}")


def compare(file: File, overrides: Overrides = None, fresh: Fresh = False, quiet: Quiet = False) -> None:
    """Compare methods, over several seeds, on the same data.

    FILE.toml is the configuration, KEY=VALUE changes one of its keys, such as seeds=[0,1,2] or rounds=50. Every method has
    the same clients, samples and initial models. The same command goes on after an interruption.
    """
    from rich.console import Console

    from fedloom.experiment.comparison import Comparison
    from fedloom.experiment.configuration import load
    from fedloom.experiment.tables import comparison_table

    configuration = load(file, overrides or [])
    comparison = Comparison.of(configuration, again(["compare", str(file), *(overrides or [])]))
    use_threads(configuration)
    with shown(len(comparison.names), configuration.schedule.rounds, quiet) as watch, patient(watch) as stopped:
        failed = comparison.run(watch, fresh=fresh, stopped=stopped)
    summaries = comparison.summaries(failed)
    if summaries:
        Console().print(comparison_table(comparison.rows(summaries), Console().width))
    folder = configuration.folder
    print(f"figures: {folder / 'comparison.csv'}, {folder / 'comparison.json'}\nreport:  {folder / 'report.html'}")
    if failed:
        name, reason = next(iter(failed.items()))
        raise Failed(f"{len(failed)} of {len(comparison.names)} runs failed, the first ({name}): {reason}")
