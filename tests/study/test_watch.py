"""`fedloom watch`: its output about runs, its access rules, and the page in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedloom.common.errors import InvalidValue
from fedloom.runs.config_file import configuration
from fedloom.runs.configured import run_configured
from fedloom.runs.directory import RunDirectory, read_json
from fedloom.runs.events import Event, RunName
from fedloom.study.watch import live
from fedloom.study.watch.live import Watched
from fedloom.study.watch.serve import MOST_READERS, Server
from report_support import CHROMIUM, SECONDS, Browser

Ask = Callable[..., tuple[int, str]]


def small_run(
    folder: Path,
    seed: int = 0,
    stop_after: int | None = None,
    method: str = "fedavg",
    data: str = "digits",
) -> Path:
    """Make a run of six rounds below `folder`, or its first rounds."""
    table = {
        "directory": str(folder),
        "rounds": 6,
        "participation": 0.5,
        "model": "logistic",
        "evaluate_every": 1,
    }
    settings = configuration({**table, "data": {"name": data, "clients": 4, "partition": "iid"}})

    def stop(event: Event) -> None:
        if event.kind == "round" and event.finished == stop_after:
            raise KeyboardInterrupt

    try:
        run_configured(settings, RunName(method, seed), stop)
    except KeyboardInterrupt:
        assert stop_after is not None
    return folder / method / f"seed-{seed}"


@contextmanager
def served(folder: Path) -> Iterator[tuple[Server, Ask]]:
    server = Server(folder, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def ask(path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
        line = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=SECONDS)
        line.request(method, path, headers={"Host": server.hosts[0] if host is None else host})
        answer = line.getresponse()
        text = answer.read().decode()
        line.close()
        return answer.status, text

    try:
        yield server, ask
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make one finished run, one stopped run, and a run of another experiment."""
    directory = tmp_path_factory.mktemp("watched")
    small_run(directory / "job", 0)
    small_run(directory / "job", 1, stop_after=2)
    small_run(directory / "other", 0, data="diabetes")
    return directory


def runs_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for group in state["groups"] for run in group["runs"]]


def test_the_state_tells_where_each_run_stands(folder: Path) -> None:
    state = Watched(folder).state()
    assert [group["name"] for group in state["groups"]] == ["job", "other"]
    finished, stopped, regression = runs_of(state)
    accuracies = [
        record["accuracy"]
        for record in RunDirectory(folder / "job/fedavg/seed-0").summary().records
    ]
    assert (finished["state"], finished["rounds"], finished["total"], finished["left"]) == (
        "finished",
        6,
        6,
        None,
    )
    shown = [f"{100 * value:.2f}" for value in (accuracies[-1], max(accuracies))]
    assert [finished["score"], finished["best"]] == shown
    assert (stopped["seed"], stopped["rounds"], stopped["total"]) == (1, 2, 6)
    assert stopped["left"] == pytest.approx(4 * stopped["pace"])
    assert regression["total"] == 6
    assert [group["heads"] for group in state["groups"]] == [
        ["Accuracy, %", "Best, %"],
        ["RMSE", "Best"],
    ]


def test_a_run_that_writes_nothing_any_more_is_not_said_to_go_on(folder: Path) -> None:
    directory = folder / "job/fedavg/seed-1"
    assert runs_of(Watched(folder).state())[1]["state"] == "running"
    hour_ago = time.time() - 3600
    stats = {path: path.stat() for path in directory.iterdir() if path.is_file()}
    for path in stats:
        os.utime(path, (hour_ago, hour_ago))
    listed = runs_of(Watched(folder).state())[1]
    for path, status in stats.items():
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert listed["state"] == "quiet"
    assert listed["quiet"] == pytest.approx(3600, abs=60)


def test_any_folder_from_all_runs_down_to_a_single_one_can_be_watched(folder: Path) -> None:
    for inside, count in (("", 3), ("job", 2), ("job/fedavg", 2), ("job/fedavg/seed-0", 1)):
        assert len(runs_of(Watched(folder / inside).state())) == count
    page = Watched(folder / "job").page(None)
    assert page is not None
    assert "Learning curves" in page
    overview = Watched(folder).page(None)
    assert overview is not None
    assert "Learning curves" not in overview
    assert Watched(folder).page("elsewhere") is None


def test_the_version_changes_with_the_figures_and_the_report_with_it(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert "No run has started" in (watched.page(None) or "")
    small_run(tmp_path, stop_after=2)
    group, page = watched.state()["groups"][0], watched.page(None)
    assert watched.state()["groups"][0]["version"] == group["version"]
    small_run(tmp_path)
    extended = watched.state()["groups"][0]
    assert extended["version"] != group["version"]
    assert extended["runs"][0]["rounds"] == 6
    assert watched.page(None) != page


def test_damaged_and_half_made_runs_are_passed_over(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "job", tmp_path / "job")
    (tmp_path / "job/fedavg/seed-0/task.json").write_text("{")
    unfinished = tmp_path / "job/fedmr/seed-0"
    unfinished.mkdir(parents=True)
    (unfinished / "configuration.json").write_text("{}")
    (tmp_path / "loop").symlink_to(tmp_path)
    with (tmp_path / "job/fedavg/seed-1/metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "accu')
    damaged, listed = runs_of(Watched(tmp_path).state())
    assert (damaged["algorithm"], damaged["seed"], damaged["state"], damaged["score"]) == (
        "fedavg",
        0,
        "damaged",
        "–",
    )
    assert (listed["seed"], listed["rounds"]) == (1, 2)
    assert Watched(tmp_path).page(None) is not None


def test_only_requests_that_mean_this_server_are_answered(folder: Path) -> None:
    with served(folder) as (server, ask):
        assert server.server_address[0] == "127.0.0.1"
        assert ask("/")[0] == 200
        assert ask("/", host=server.hosts[1])[0] == 200
        for host in (
            "evil.example",
            f"evil.example:{server.server_address[1]}",
            "127.0.0.1",
            "127.0.0.1:1",
            "",
        ):
            status, text = ask("/state", host=host)
            assert status == 421, host
            assert "fedavg" not in text


@pytest.mark.parametrize(
    "path",
    [
        "/job/fedavg/seed-0/configuration.json",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/?group=../..",
        "/?group=%2Fetc",
        "/?group=job/fedavg",
        "/favicon.ico",
    ],
)
def test_no_request_reaches_a_file(folder: Path, path: str) -> None:
    with served(folder) as (_, ask):
        assert ask(path) == (404, "There is no such page.\n")


def test_nothing_can_be_changed(folder: Path) -> None:
    original = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    with served(folder) as (_, ask):
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask("/", method)[0] == 501
        assert ask("/", "HEAD") == (200, "")
        state = json.loads(ask("/state")[1])
        ask("/?group=job")
    assert len(runs_of(state)) == 3
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == original


def test_a_port_that_is_taken_is_told_in_one_line(folder: Path) -> None:
    with served(folder) as (server, _):
        port = server.server_address[1]
        with pytest.raises(
            InvalidValue, match=rf"^port {port} cannot be used \(.+\): choose another with --port$"
        ):
            Server(folder, port)


def test_names_of_methods_cannot_smuggle_code_into_the_page(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "job", tmp_path / "job")
    path = tmp_path / "job/fedavg/seed-0/configuration.json"
    configuration = read_json(path, dict)
    path.write_text(
        json.dumps({**configuration, "algorithm": "</script><script>alert(1)</script>"})
    )
    page = Watched(tmp_path).page(None)
    assert page is not None
    assert "<script>alert(1)" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_follows_a_run_and_stays_where_the_reader_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "REFRESH", 0.2)
    small_run(tmp_path / "job", 0)
    small_run(tmp_path / "job", 0, stop_after=2, method="fedmr")
    with served(tmp_path / "job") as (server, _), Browser(tmp_path / "profile") as browser:
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=1100,
            height=800,
            deviceScaleFactor=1,
            mobile=False,
        )
        browser.call("Page.navigate", url=server.url)
        wait_for(browser, "document.documentElement.dataset.drawn === 'all'")
        wait_for(browser, "document.querySelectorAll('#watch tbody tr').length === 2")
        assert "2 of 6 rounds" in browser.run("document.getElementById('watch').textContent")
        browser.run(
            "document.querySelector('.chip').click(); scrollTo(0, 600); window.mine = true; 0"
        )
        small_run(tmp_path / "job", 0, method="fedmr")
        wait_for(
            browser, "window.mine === undefined && document.documentElement.dataset.drawn === 'all'"
        )
        wait_for(
            browser, "document.getElementById('watch').textContent.includes('2 of 2 finished')"
        )
        # The page may load once more, so everything is read at one moment.
        wait_for(
            browser,
            "scrollY === 600 && document.documentElement.dataset.drawn === 'all' && "
            "[...document.querySelectorAll('.chip')].map(chip => chip.ariaPressed).join() "
            "=== 'false,true'",
        )
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=390,
            height=800,
            deviceScaleFactor=1,
            mobile=True,
        )
        cut = (
            "[document.documentElement, ...document.querySelectorAll('#watch *')].filter(e "
            "=> e.scrollWidth > e.clientWidth"
        )
        wait_for(browser, f"{cut} && e.clientWidth).length === 0")  # a phone shows all of it
        assert browser.errors == []
        assert {url.split("/")[2] for url in browser.requests if url.startswith("http")} == {
            server.hosts[0]
        }


def wait_for(browser: Browser, condition: str) -> None:
    began = time.perf_counter()
    while browser.run(f"Boolean(document.getElementById('watched') && ({condition}))") is not True:
        assert time.perf_counter() - began < SECONDS, condition
        time.sleep(0.05)


def test_the_command_serves_until_it_is_interrupted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "fedloom", "watch"]
    with subprocess.Popen(
        [*command, str(folder), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"{folder}: http://127.0.0.1:")
        port = int(line.rstrip("/\n").rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        connection.request("GET", "/state")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(SECONDS) == 130
        finally:
            process.kill()


def test_readers_that_never_read_hold_a_bounded_number_of_pages(tmp_path: Path) -> None:
    server = Server(tmp_path, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    idle = [socket.create_connection(server.server_address[:2]) for _ in range(MOST_READERS + 8)]
    try:
        deadline = time.monotonic() + SECONDS
        closed = 0
        for reader in idle[MOST_READERS:]:
            reader.settimeout(max(0.1, deadline - time.monotonic()))
            closed += reader.recv(1) == b""
        assert closed == 8
        handlers = [t for t in threading.enumerate() if "process_request_thread" in t.name]
        assert len(handlers) <= MOST_READERS
        idle[0].close()
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
            try:
                connection.request("GET", "/state")
                assert connection.getresponse().status == 200
                break
            except (ConnectionError, http.client.HTTPException):
                time.sleep(0.05)
            finally:
                connection.close()
        else:
            raise AssertionError("the place of a reader that left is not free again")
    finally:
        for reader in idle:
            reader.close()
        server.shutdown()
        server.server_close()
