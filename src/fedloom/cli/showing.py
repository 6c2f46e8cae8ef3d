"""`fedloom report` and `fedloom watch`."""

import sys
from typing import Annotated

import typer

from fedloom.cli.options import Folder, Quiet, option
from fedloom.errors import InvalidValue

Port = Annotated[int, option(help="Where to listen, 8600 by default; 0: any free port.", min=0, max=65535)]
Images = Annotated[str, typer.Option(metavar="FORMATS", help="Also write every figure as png, svg or pdf: png,svg.")]
Plain = Annotated[bool, typer.Option("--no-captions", help="Images without title and caption, as for a paper.")]
Methods = Annotated[
    list[str] | None, option(metavar="METHOD", help="Draw the loss around METHOD's model, or all models'.")
]
Options = Annotated[str, typer.Option(metavar="OPTIONS", help='Such as "grid=31, radius=0.5, data=test".')]


def report(
    folder: Folder,
    images: Images = "",
    no_captions: Plain = False,
    landscape: Methods = None,
    landscape_options: Options = "",
    quiet: Quiet = False,
) -> None:
    """Write the report of a run or a comparison again, and its figures as images.

    DIR holds a run or a comparison, such as runs/digits. Nothing is trained: all comes from what is recorded there.
    """
    from fedloom.experiment.finished import add_landscapes, read_runs, rewrite_reports, with_trajectories
    from fedloom.recording.landscape import Landscape
    from fedloom.recording.recorder import build_recorders
    from fedloom.report.image_files import require_images, write_images
    from fedloom.report.page import options_of
    from fedloom.report.sheet import criterion

    formats = [name.strip() for name in images.split(",") if name.strip()]
    if formats:
        require_images(formats)
    if landscape_options and not landscape:
        raise InvalidValue("--landscape-options needs --landscape METHOD, or --landscape all")
    runs = read_runs(folder)
    if landscape:
        (recorder,) = build_recorders([f"landscape({landscape_options})" if landscape_options else "landscape"])
        assert isinstance(recorder, Landscape)
        runs = add_landscapes(runs, landscape, recorder, lambda text: None if quiet else print(text, file=sys.stderr))
    pages = rewrite_reports(folder, runs)
    for page in pages:
        print(f"report: {page}")
    if formats:
        about = options_of(pages[0])
        target = next(iter(about.targets), None) if about else None
        by = criterion(about.measure, about.last, runs[0].summary.metric, target) if about else None
        shown = [run.labelled for run in with_trajectories(folder, runs)]
        files = write_images(folder / "images", shown, formats, by, captions=not no_captions)
        print(f"images: {folder / 'images'} ({len(files)} files)")


def watch(folder: Folder, port: Port = 8600) -> None:
    """Show runs in the browser while they go on.

    DIR holds runs, such as runs/digits, or all of runs. The page follows them by itself; only this machine can see it.
    Ctrl-C ends it.
    """
    from fedloom.experiment.watch.serve import Server

    if not folder.is_dir():
        raise InvalidValue(f"{folder} is {'no folder' if folder.exists() else 'not there'}: give a folder of runs")
    server = Server(folder, port)
    print(f"{folder}: {server.url}", flush=True)
    with server:
        server.serve_forever()
