"""Pools of runs.

A run that stops, fails or is killed does not affect others, and no process outlives its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.runs.events import Event
from fedloom.study.pools import ProcessPool, SerialPool
from pools_support import ROUNDS, jobs, rounds
from ray_support import gone_soon


def test_a_worker_that_dies_fails_its_run_alone(tmp_path: Path) -> None:
    pool = ProcessPool(1, 1)
    heard: list[Event] = []

    def watch(event: Event) -> None:
        heard.append(event)
        if [event.kind for event in heard] == ["started", "round"]:
            os.kill(*(process.pid or 0 for process in pool.processes.values()), signal.SIGKILL)

    killed, spared = jobs(tmp_path)
    failed = pool.run([killed, spared], watch, False, lambda: False)
    pool.close()
    reason = "its worker process died (exit code -9)"
    assert failed == {killed.name: reason}
    assert [event.text for event in heard if event.kind == "failed"] == [reason]
    assert spared.finished
    assert rounds(spared) == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize("kind", ["serial", "processes"])
def test_when_runs_are_to_stop_the_round_under_way_is_finished_and_no_run_begun(
    tmp_path: Path, kind: str
) -> None:
    pool = SerialPool() if kind == "serial" else ProcessPool(1, 1)
    heard: list[Event] = []
    begun, waiting = jobs(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        pool.run(
            [begun, waiting],
            heard.append,
            False,
            lambda: any(event.kind == "round" for event in heard),
        )
    pool.close()
    assert rounds(begun) == list(range(1, len(rounds(begun)) + 1))
    assert 1 <= len(rounds(begun)) <= ROUNDS
    assert not any(event.run == waiting.name for event in heard)
    failed = (serial := SerialPool()).run(
        [begun, waiting], lambda event: None, False, lambda: False
    )
    serial.close()
    assert failed == {}
    assert rounds(begun) == rounds(waiting) == list(range(1, ROUNDS + 1))


PROGRAM = """
import sys

if __name__ == "__main__":
    from fedloom.engines.processes.parent import ProcessesEngine
    from fedloom.study.pools import ProcessPool
    from small_task import small_task

    task = small_task()
    sys.path.insert(0, sys.argv[1])
    engine = ProcessesEngine(task, workers=2)
    pool = ProcessPool(1, 1)
    pool.start()
    print(*engine.processes, *(process.pid for process in pool.processes.values()), flush=True)
    sys.stdin.read()
"""
"""Workers of this program import another torch from the given folder and never finish it."""


def test_workers_that_are_still_starting_end_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "endless" / "torch").mkdir(parents=True)
    mark = tmp_path / "importing"
    (tmp_path / "endless" / "torch" / "__init__.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(mark)!r} + "
        "str(os.getpid())).touch()\nwhile True: time.sleep(1)\n"
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "endless")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 3
        while not all(Path(f"{mark}{worker}").exists() for worker in workers):
            assert parent.poll() is None
        parent.kill()
    assert gone_soon(workers), "a worker outlived its parent"


RUNNING = """
import sys
from pathlib import Path

if __name__ == "__main__":
    from fedloom.study.pools import ProcessPool
    from pools_support import jobs

    pool = ProcessPool(2, 1)

    def watch(event):
        if event.kind == "round" and len(pool.busy) == 2:
            print(*(process.pid for process in pool.processes.values()), flush=True)

    pool.run(jobs(Path(sys.argv[1]), rounds=10**6), watch, False, lambda: False)
"""


def test_workers_in_the_middle_of_runs_end_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RUNNING)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    assert gone_soon(workers), "a worker outlived its parent"
