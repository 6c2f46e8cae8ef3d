"""Settings, fixtures and the order of all tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # PyTorch reads it once, at its import
import torch

if TYPE_CHECKING:
    from fedloom.engines.processes.parent import ProcessesEngine
    from fedloom.engines.ray.driver import RayEngine
    from forking_scripts import Scripts

FOLDER = Path(__file__).parent

# Runs flush their files. On a disk, tests spend nearly half of their time on it; in memory, none.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())

# A temporary folder for all processes of the session: at its end, `pytest_sessionfinish` requires
# that fedloom has removed its own. The workers of pytest-xdist inherit it. The name is short
# because of sockets.
ALONE = "PYTEST_XDIST_WORKER" not in os.environ
"""True in the process that the user has started."""
if ALONE:
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="t-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"])
    tempfile.tempdir = None
TEMPORARY = Path(os.environ["TMPDIR"])

# The models here are small, so threads that wait for each other cost more than the work: a hundred
# times as long on busy cores.
torch.set_num_threads(1)

# If a shell runs the tests in the background, the tests and their programs ignore Ctrl-C. Some
# tests send Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# These files import Flower at their beginning. Other tests report a missing package when they are
# skipped.
collect_ignore = (
    []
    if importlib.util.find_spec("flwr")
    else [
        "sites/test_faults.py",
        "sites/test_secure_round.py",
        "sites/test_server_app.py",
        "sites/test_same_numbers.py",
    ]
)

# The longest files begin first. Otherwise one worker would end with them while the others wait.
LONGEST = (
    "sites/test_real_sites.py",
    "engines/test_conformance.py",
    "engines/test_ray.py",
    "engines/test_ray_cluster.py",
    "study/test_ray_pool.py",
    "engines/test_processes.py",
    "project/test_exported.py",
    "runs/test_resume.py",
    "runs/test_trackers.py",
    "project/test_examples.py",
)

# Files with shared resources that take seconds to start or to import. One worker runs them all
# (`--dist loadgroup`). Tests that mostly wait, for sites and for Ray, form one group, so the other
# workers keep the cores busy meanwhile.
TOGETHER = {
    "engines/test_ray.py": "waiting",
    "engines/test_ray_cluster.py": "waiting",
    "study/test_ray_pool.py": "waiting",
    "sites/test_real_sites.py": "waiting",
    "sites/test_site_worker.py": "waiting",
    "sites/test_journey.py": "waiting",
    "report/test_real_report.py": "report",
    "report/test_browser.py": "report",
    "runs/test_resume.py": "resume",
    "engines/test_processes.py": "processes",
    "engines/test_dispatch.py": "processes",
}


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use a temporary cache folder, so tests neither read nor change the user's."""
    os.environ["FEDLOOM_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Reset the number of threads after each test."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def worker_processes() -> Iterator[ProcessesEngine]:
    """Two shared worker processes; each test gives them its own task."""
    from fedloom.engines.processes.parent import ProcessesEngine
    from small_task import small_task

    engine = ProcessesEngine(small_task())
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def ray_actors() -> Iterator[RayEngine]:
    """Two actors on a local Ray cluster, as `worker_processes`."""
    from fedloom.engines.ray.driver import RayEngine
    from small_task import small_task

    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # else Ray's workers wait
        engine = RayEngine(small_task(), workers=2)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def scripts() -> Iterator[Scripts]:
    """A process with the package loaded; it forks one process for each script of a test."""
    from forking_scripts import serving

    with serving() as server:
        yield server


def _place(item: pytest.Item) -> str:
    """Return the file of a test, as `LONGEST` names it."""
    return item.path.relative_to(FOLDER).as_posix()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests for several workers."""
    if not config.getoption("loadgroup", False):  # set by pytest-xdist in its workers
        return
    rank = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(_place(item), len(rank)))
    for item in items:
        if group := TOGETHER.get(_place(item)):
            item.add_marker(pytest.mark.xdist_group(group))


def _left_behind() -> list[str]:
    """Return the temporary files of fedloom that no object of this process will remove.

    A file lock stays, since removing it would let two processes hold it.
    """
    gc.collect()
    kept = set()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (alive := finalizer.peek()) is not None:
            kept.update(map(str, alive[2]))
    found = [path for path in TEMPORARY.glob("fedloom*") if path.suffix != ".lock"]
    return sorted(str(path) for path in found if str(path) not in kept)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if fedloom has left files in the temporary folder."""
    if ALONE and not session.config.option.collectonly and (left := _left_behind()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nLeft in the temporary folder: {', '.join(left)}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the number of skipped tests for each reason as the last line."""
    if ALONE:
        shutil.rmtree(TEMPORARY, ignore_errors=True)
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not (skipped := reporter.stats.get("skipped")):
        return
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    reporter.write_line(
        "Skipped: " + "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    )
