"""Bundles: contents, byte-identical replay, differences and hostile files."""

from __future__ import annotations

import io
import json
import os
import random
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from data_support import idx_bytes
from fedloom.common.digest import digest
from fedloom.common.errors import DataError, InvalidValue
from fedloom.common.expression import parse
from fedloom.data.dataset import datasets
from fedloom.data.partition import partitions
from fedloom.models import models
from fedloom.reviews.evidence.bundle import (
    _LOCATIONS,
    MOST_FILES,
    _own_modules,
    relocated,
    rewritten,
    unpack,
    write_bundle,
)
from fedloom.reviews.evidence.replay import Replay, _offline
from fedloom.runs.directory import to_json
from fedloom.state.tensors import read_tensors, write_tensors
from forking_cli import Say, main, saying

ROOT = Path(__file__).resolve().parents[2]

JOB = """
algorithm = "fedavg"
algorithms = ["fedavg", "fedmr(unit=tensor)"]
seeds = [0, 1]
rounds = 3
participation = 0.5
evaluate_every = 1
model = "logistic"
threads = 1
workers = 1
[data]
clients = 4
partition = "dirichlet(0.5)"
[training]
learning_rate = 0.3
"""


@pytest.fixture
def fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that runs the command in an empty folder.

    For example, `fed("paper", "bundle", "runs/job")` returns (exit code, stdout, stderr).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return saying(capsys)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle of a comparison."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "job.toml").write_text(JOB)
    assert main(["compare", str(folder / "job.toml"), f"directory={folder / 'job'}", "-q"]) == 0
    assert main(["paper", "bundle", str(folder / "job"), "--to", str(folder / "job.zip")]) == 0
    return folder / "job.zip"


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(path: Path, files: dict[str, bytes], **about: Any) -> Path:
    """Write a bundle with these files and correct digests."""
    listed = json.loads(files["bundle.json"]) | about
    payload = {name: content for name, content in files.items() if name != "bundle.json"}
    listed["files"] = {name: digest(content) for name, content in payload.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {"bundle.json": json.dumps(listed).encode(), **payload}.items():
            archive.writestr(name, content)
    return path


def edited(path: Path, source: Path, name: str, edit: Callable[[Any], Any]) -> Path:
    """Write a bundle with edits in the JSON file `name` of each run."""
    files = contents(source)
    for full in files:
        if full.endswith(f"/{name}"):
            if name.endswith(".jsonl"):
                lines = [edit(json.loads(line)) for line in files[full].splitlines()]
                files[full] = "".join(json.dumps(line) + "\n" for line in lines).encode()
            else:
                value = {
                    key: item for key, item in json.loads(files[full]).items() if key != "digest"
                }
                files[full] = to_json(edit(value)).encode()
    return packed(path, files)


def test_a_bundle_holds_figures_models_and_digests_but_no_data(compared: Path) -> None:
    files = contents(compared)
    names = {name.split("/", 2)[2] for name in files if name.startswith("runs/")}
    assert names == {
        "configuration.json", "environment.json", "task.json", "result.json", "engine.json", "metrics.jsonl", "model.safetensors",
        "preprocessing.json",
    }  # fmt: skip
    assert compared.stat().st_size < 200_000
    assert set(json.loads(files["runs/0/task.json"])["digests"]) == {"data", "split", "start"}
    about = json.loads(files["bundle.json"])
    assert [(run["algorithm"], run["seed"]) for run in about["runs"]] == [
        ("fedavg", 0), ("fedmr(unit=tensor)", 0), ("fedavg", 1), ("fedmr(unit=tensor)", 1),
    ]  # fmt: skip


def test_the_same_runs_give_the_same_bundle(compared: Path, tmp_path: Path) -> None:
    write_bundle(compared.parent / "job", tmp_path / "again.zip")
    assert contents(tmp_path / "again.zip") == contents(compared)


def test_a_replay_gives_the_same_bytes_and_says_so(compared: Path, fed: Say) -> None:
    code, out, _ = fed("paper", "replay", str(compared), "--estimate")
    assert code == 0
    assert "job: 2 cells, 4 runs, 12 rounds, on digits" in out
    assert "the same versions and processor" in out
    assert not Path("runs/replay/job/0").exists()
    code, out, err = fed("paper", "replay", str(compared), "-q")
    assert (code, err) == (0, "")
    assert out.count("the same bytes") == 2
    code, out, _ = fed("paper", "replay", str(compared), "-q")  # reads the finished runs
    assert (code, out.count("the same bytes")) == (0, 2)


def test_a_single_run_and_a_recorded_one_are_replayed(fed: Say) -> None:
    Path("job.toml").write_text(JOB)
    assert fed("run", "job.toml", 'record=["steps", "similarity"]', "rounds=2", "-q")[0] == 0
    code, out, _ = fed("paper", "bundle", "runs/job/fedavg/seed-0")
    assert (code, out.splitlines()[0][:18]) == (0, "seed-0.zip: 1 run,")
    assert "runs/0/recorded/round-0000002.safetensors" in contents(Path("seed-0.zip"))
    code, out, _ = fed("paper", "replay", "seed-0.zip", "-q")
    assert (code, out.count("the same bytes")) == (0, 1)

    def with_other_loss(line: dict[str, Any]) -> dict[str, Any]:
        return line | {"loss": 2 * line["loss"]} if line["round"] == 2 else line

    wrong = edited(Path("wrong.zip"), Path("seed-0.zip"), "metrics.jsonl", with_other_loss)
    files = contents(wrong)
    name = "runs/0/recorded/round-0000002.safetensors"
    Path("round.safetensors").write_bytes(files[name])
    tensors, metadata = read_tensors(Path("round.safetensors"))
    key = next(key for key in sorted(tensors) if "/after/" in key)
    write_tensors(Path("round.safetensors"), tensors | {key: tensors[key] + 0.1}, metadata)
    packed(wrong, files | {name: Path("round.safetensors").read_bytes()})
    code, out, _ = fed("paper", "replay", "wrong.zip", "-q")
    assert code == 1
    assert "different" in out
    assert "from round 2 on: loss" in out
    assert (
        f"first in round 2, client {key.split('/')[1]}, local step {key.split('/')[2]}: after "
        f"{key.split('/')[4]}" in out
    )


def test_small_differences_are_float_tolerance(compared: Path, fed: Say) -> None:
    files = contents(
        edited(
            Path("near.zip"),
            compared,
            "metrics.jsonl",
            lambda line: line | {"loss": line["loss"] + 1e-7},
        )
    )
    packed(Path("near.zip"), files)
    code, out, _ = fed("paper", "replay", "near.zip", "-q")
    assert (code, out.count("the same to float tolerance")) == (0, 2)


def test_a_figure_within_the_spread_of_the_seeds_is_told_from_one_beyond(
    compared: Path, fed: Say
) -> None:
    def seeds_apart(files: dict[str, bytes], by: float, gap: float) -> dict[str, bytes]:
        changed = dict(files)
        for number in range(4):
            name = f"runs/{number}/metrics.jsonl"
            lines = [json.loads(line) for line in files[name].splitlines()]
            for line in lines[1:]:
                line["accuracy"] += by + (gap if number > 1 else 0)
            changed[name] = "".join(json.dumps(line) + "\n" for line in lines).encode()
        return changed

    elsewhere = edited(
        Path("elsewhere.zip"),
        compared,
        "environment.json",
        lambda about: about | {"processor": "abacus"},
    )
    fed("paper", "replay", str(compared), "-q", "--directory", "honest")
    finals = [
        json.loads(Path(f"honest/{k}/metrics.jsonl").read_text().splitlines()[-1])["accuracy"]
        for k in range(4)
    ]
    spread = max(abs(finals[0] - finals[2]), abs(finals[1] - finals[3])) * 2**0.5
    test_samples = json.loads(contents(compared)["runs/0/task.json"])["test_samples"]
    gap = 0.9 * spread
    assert gap > 4 / test_samples + 2e-3  # larger than the float tolerance
    packed(Path("within.zip"), seeds_apart(contents(elsewhere), gap, 0))
    _, out, _ = fed("paper", "replay", "within.zip", "-q")
    assert "within the seeds' spread" in out
    # With equal versions and processor, each difference counts.
    packed(Path("forged.zip"), seeds_apart(contents(compared), gap, 0))
    code, out, _ = fed("paper", "replay", "forged.zip", "-q")
    assert (code, out.count("different")) == (1, 2)
    # Invented seeds in the bundle do not increase the spread.
    packed(Path("invented.zip"), seeds_apart(contents(elsewhere), 0.02, 0.5))
    code, out, _ = fed("paper", "replay", "invented.zip", "-q")
    assert (code, out.count("different")) == (1, 2)
    packed(Path("beyond.zip"), seeds_apart(contents(compared), 0.9, 0.001))
    code, out, _ = fed("paper", "replay", "beyond.zip", "-q")
    assert (code, out.count("different")) == (1, 2)
    assert "from round 2 on: accuracy" in out


def test_another_final_model_is_named_by_its_tensor(compared: Path, fed: Say) -> None:
    files = contents(compared)
    for number in range(4):
        Path("model.safetensors").write_bytes(files[f"runs/{number}/model.safetensors"])
        tensors, metadata = read_tensors(Path("model.safetensors"))
        name = max(tensors)
        write_tensors(Path("model.safetensors"), tensors | {name: tensors[name] * 1.5}, metadata)
        files[f"runs/{number}/model.safetensors"] = Path("model.safetensors").read_bytes()
    packed(Path("model.zip"), files)
    code, out, _ = fed("paper", "replay", "model.zip", "-q")
    assert (code, out.count("different")) == (1, 2)
    assert f"the final model differs most in {name}, by 0.3 of it" in out


def test_what_changed_since_another_version_is_said(compared: Path, fed: Say) -> None:
    edited(
        Path("old.zip"),
        compared,
        "environment.json",
        lambda about: about | {"torch": "1.0", "processor": "abacus"},
    )
    code, out, _ = fed("paper", "replay", "old.zip", "--estimate")
    assert code == 0
    assert f"made with torch 1.0 (now {torch.__version__}), abacus (now " in out
    edited(
        Path("keys.zip"),
        compared,
        "configuration.json",
        lambda stored: stored | {"algorithm": "fedavgg"},
    )
    code, _, err = fed("paper", "replay", "keys.zip", "--estimate")
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean 'fedavg'? (there are: " in err
    packed(Path("format.zip"), contents(compared), format=2, fedloom="9.9")
    code, _, err = fed("paper", "replay", "format.zip")
    assert (code, err.count("\n")) == (2, 1)
    assert "format Input should be 1" in err


def test_keys_that_act_on_the_machine_are_not_taken_over(
    compared: Path, fed: Say, tmp_path: Path
) -> None:
    stranger = {
        "directory": "/tmp/elsewhere", "trackers": ["mlflow"], "pool": "ray://evil:1", "engine": "ray(address='evil')",
        "device": "cuda:7", "workers": 64, "pool_budget": 1, "seeds": [1], "variants": {},
    }  # fmt: skip
    edited(Path("keys.zip"), compared, "configuration.json", lambda stored: stored | stranger)
    replay = Replay(unpack(Path("keys.zip"), tmp_path / "r" / "bundle"), tmp_path / "r", {})
    configuration = replay.jobs[0].configuration
    assert configuration.directory == str(tmp_path / "r")
    assert (configuration.trackers, configuration.engine) == ([], "stacked")
    assert (configuration.device, configuration.workers) == ("cpu", "auto")


METHOD = """
from pathlib import Path
from dataclasses import dataclass
import helper
from fedloom import FedAvg

Path("code-has-run").touch()

@dataclass
class Half(FedAvg):
    "FedAvg that says something. \\x1b[31m"
    factor: float = helper.FACTOR
"""


def run_apart(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the command in a separate process.

    The process has not imported modules of another folder.
    """
    done = subprocess.run(
        [sys.executable, "-m", "fedloom", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_code_of_ones_own_travels_is_shown_and_runs_only_where_it_is_trusted(
    tmp_path: Path,
) -> None:
    origin, target = tmp_path / "here", tmp_path / "there"
    for folder in (origin, target):
        folder.mkdir()
    (origin / "job.toml").write_text(
        JOB.replace('algorithm = "fedavg"', 'algorithm = "my_methods:Half(factor=0.5)"')
    )
    (origin / "my_methods.py").write_text(METHOD)
    (origin / "helper.py").write_text("FACTOR = 1.0\n")
    assert run_apart(origin, "run", "job.toml", "-q")[0] == 0
    (run,) = (origin / "runs/job").glob("*/seed-0")
    code, out, err = run_apart(origin, "paper", "bundle", str(run), "--to", str(target / "own.zip"))
    assert code == 0, err
    assert "code/my_methods.py" in out
    assert {"code/my_methods.py", "code/helper.py"} <= contents(target / "own.zip").keys()
    code, out, err = run_apart(target, "paper", "replay", "own.zip")
    assert (code, err.count("\n")) == (2, 1)
    assert "read it, then add --trust-code" in err
    assert "class Half(FedAvg):" in out
    assert "FACTOR = 1.0" in out
    assert "\x1b" not in out
    assert not (target / "code-has-run").exists()
    code, out, err = run_apart(target, "paper", "replay", "own.zip", "--trust-code", "-q")
    assert (code, out.count("the same bytes")) == (0, 1), err
    assert (target / "code-has-run").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "os:getcwd"),
        ("algorithm", "subprocess:Popen(args='true')"),
        ("objective", "os:system"),
        ("metrics", ["os:system"]),
        ("plugins", ["antigravity"]),
        ("training", {"optimizer": "os:_Environ"}),
        ("training", {"schedule": "os:getpid"}),
        ("data", {"name": "python(source='os:listdir')", "clients": 4, "partition": "iid"}),
    ],
)
def test_a_configuration_names_no_code_that_is_not_trusted(
    key: str, value: Any, compared: Path, fed: Say
) -> None:
    def edit(stored: dict[str, Any]) -> dict[str, Any]:
        return stored | {key: {**stored[key], **value} if isinstance(value, dict) else value}

    edited(Path("code.zip"), compared, "configuration.json", edit)
    code, _, err = fed("paper", "replay", "code.zip", "-q")
    assert code in (1, 2)
    assert err.count("\n") == 1
    assert "code is not trusted here" in err
    assert "antigravity" not in sys.modules


def test_data_come_from_the_users_folders_and_must_be_those_of_the_bundle(
    fed: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "\n".join(f"{k % 7},{k % 5},{k % 2}" for k in range(60))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.csv").write_text(f"a,b,label\n{rows}\n")
    Path("job.toml").write_text(JOB)
    data = f"data.name=table(path='{tmp_path}/mine/rows.csv', test_fraction=0.3)"
    assert fed("run", "job.toml", data, "data.partition=iid", "-q")[0] == 0
    assert fed("paper", "bundle", "runs/job/fedavg/seed-0", "--to", "own.zip")[0] == 0
    assert str(tmp_path).encode() not in b"".join(
        content
        for name, content in contents(Path("own.zip")).items()
        if name.endswith("configuration.json")
    )
    code, _, err = fed("paper", "replay", "own.zip", "-q")
    assert (code, err.count("\n")) == (2, 1)
    assert "table reads 'rows.csv', which no bundle holds: give --data table=FOLDER" in err
    code, out, _ = fed("paper", "replay", "own.zip", "-q", "--data", f"table={tmp_path}/mine")
    assert (code, out.count("the same bytes")) == (0, 1)
    (tmp_path / "mine" / "rows.csv").write_text(f"a,b,label\n{rows.replace('6,', '9,')}\n")
    code, _, err = fed(
        "paper",
        "replay",
        "own.zip",
        "-q",
        "--data",
        f"table={tmp_path}/mine/rows.csv",
        "--directory",
        "again",
    )
    assert code == 2
    assert "the data differ from the bundle's data" in err


def test_nothing_is_downloaded(fed: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "MNIST"
    folder.mkdir()
    for prefix, count in (("train", 60), ("t10k", 20)):
        images, labels = np.arange(count * 784).reshape(count, 28, 28) % 251, np.arange(count) % 10
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    Path("job.toml").write_text(JOB)
    assert (
        fed("run", "job.toml", f"data.name=mnist(folder='{folder}')", "data.partition=iid", "-q")[0]
        == 0
    )
    assert fed("paper", "bundle", "runs/job/fedavg/seed-0", "--to", "mnist.zip")[0] == 0
    monkeypatch.setitem(sys.modules, "datasets", None)  # a request to the hub would fail
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    code, _, err = fed("paper", "replay", "mnist.zip", "-q")
    assert (code, err.count("\n")) == (2, 1)
    assert "mnist" in err
    code, out, _ = fed("paper", "replay", "mnist.zip", "-q", "--data", f"mnist={tmp_path}")
    assert (code, out.count("the same bytes")) == (0, 1)


def test_the_locations_in_an_expression_are_all_known() -> None:
    """All parameters with names of files or folders are in the list.

    Bundles omit the values of these parameters.
    """
    named = {
        name
        for registry in (datasets, partitions, models)
        for entry in registry
        for name in entry.parameters
        if any(word in name for word in ("path", "folder", "file", "directory"))
    }
    assert named == set(_LOCATIONS)


def test_locations_are_replaced_wherever_they_stand() -> None:
    table = {
        "data": {"name": "part(of=mnist(folder='/a/b', normalise=none), samples=9)"},
        "clock": {"trace": "/c/d.csv"},
    }
    shown = relocated(
        table, lambda name, parameter, location: f"{name} {parameter} {Path(location).name}"
    )
    assert parse(shown["data"]["name"]).named["of"].named["folder"] == "mnist folder b"
    assert shown["clock"] == {"trace": "clock trace d.csv"}
    assert (
        relocated(table, lambda *_: None)["data"]["name"]
        == "part(of=mnist(normalise=none), samples=9)"
    )
    assert (
        str(_offline(parse("part(of=mnist(hub=true), samples=9)")))
        == "part(of=mnist(hub=false), samples=9)"
    )


def test_runs_that_cannot_be_made_again_are_refused(fed: Say, tmp_path: Path) -> None:
    fedloom.run(
        "fedavg",
        fedloom.make_task("digits", clients=4, model="logistic"),
        rounds=1,
        directory=tmp_path / "python",
    )
    code, _, err = fed("paper", "bundle", "python")
    assert (code, err.count("\n")) == (2, 1)
    assert "made in Python" in err
    Path("job.toml").write_text(JOB)
    fed("run", "job.toml", "-q")
    Path("runs/job/fedavg/seed-0/result.json").unlink()
    code, _, err = fed("paper", "bundle", "runs/job/fedavg/seed-0")
    assert code == 2
    assert "is not finished" in err
    code, _, err = fed("paper", "bundle", "nowhere")
    assert code == 2
    assert "nowhere does not exist" in err


def test_a_reproduced_table_is_bundled(fed: Say) -> None:
    options = (
        "--rounds",
        "2",
        "--seeds",
        "0,1",
        "--rows",
        "FedAvg",
        "--columns",
        "15%",
        "--workers",
        "1",
        "-q",
    )
    code, _, err = fed("paper", "reproduce", "fedumf.figure-a5", *options)
    assert code == 0, err
    assert fed("paper", "bundle", "runs/reproduce/fedumf.figure-a5", "--to", "table.zip")[0] == 0
    code, out, _ = fed("paper", "replay", "table.zip", "-q")
    assert code == 0
    assert out.count("the same bytes") == 3


# --- hostile files ---


def archive_of(
    *entries: tuple[str | zipfile.ZipInfo, bytes], kind: int = zipfile.ZIP_DEFLATED
) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def lying_size(content: bytes, size: int = 1) -> bytes:
    """Return a file with another size in its headers."""
    packed = bytearray(archive_of(("runs/0/metrics.jsonl", content)))
    for signature, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        at = packed.index(signature)
        packed[at + offset : at + offset + 4] = struct.pack("<I", size)
    return bytes(packed)


def many() -> bytes:
    return archive_of(
        *((f"code/m{k}.py", b"") for k in range(MOST_FILES + 5)), kind=zipfile.ZIP_STORED
    )


def lying_count() -> bytes:
    packed = bytearray(many())
    packed[-14:-10] = struct.pack("<HH", 1, 1)
    return bytes(packed)


GOOD = b'{"title": "t", "runs": [], "files": {}}'

HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no archive": lambda: b"PK" * 100,
    "no list": lambda: archive_of(("runs/0/metrics.jsonl", b"")),
    "traversal": lambda: archive_of(("bundle.json", GOOD), ("runs/0/../../../evil.py", b"x")),
    "above": lambda: archive_of(("bundle.json", GOOD), ("../evil.py", b"x")),
    "absolute": lambda: archive_of(("bundle.json", GOOD), ("/tmp/evil.py", b"x")),
    "a drive": lambda: archive_of(("bundle.json", GOOD), ("C:\\evil.py", b"x")),
    "backslashes": lambda: archive_of(("bundle.json", GOOD), ("code\\..\\..\\evil.py", b"x")),
    "a NUL": lambda: archive_of(("bundle.json", GOOD), ("code/evil.py", b"x")).replace(
        b"code/evil.py", b"code/e\0il.py"
    ),
    "a line": lambda: archive_of(("bundle.json", GOOD), ("code/evil.py\n", b"x")),
    "another kind": lambda: archive_of(("bundle.json", GOOD), ("runs/0/model.pkl", b"x")),
    "a folder": lambda: archive_of(("bundle.json", GOOD), ("runs/0/", b"")),
    "a link": lambda: archive_of(("bundle.json", GOOD), (link("code/evil.py"), b"/etc/passwd")),
    "two of a name": lambda: archive_of(
        ("bundle.json", GOOD), ("code/a.py", b"x"), ("code/b.py", b"y")
    ).replace(b"b.py", b"a.py"),
    "another packing": lambda: archive_of(
        ("bundle.json", GOOD), ("code/a.py", b"x"), kind=zipfile.ZIP_LZMA
    ),
    "a file beside the list": lambda: archive_of(("bundle.json", GOOD), ("code/a.py", b"x")),
    "a file that is missing": lambda: archive_of(
        ("bundle.json", GOOD.replace(b'"files": {}', b'"files": {"code/a.py": "0"}'))
    ),
    "a wrong digest": lambda: archive_of(
        ("bundle.json", GOOD.replace(b"{}", b'{"code/a.py": "00"}')), ("code/a.py", b"x")
    ),
    "deep JSON": lambda: archive_of(("bundle.json", b"[" * 200_000)),
    "deep JSON inside": lambda: archive_of(("bundle.json", b'{"title": ' + b"[" * 200_000)),
    "a list that is none": lambda: archive_of(
        ("bundle.json", b'{"title": 1, "runs": {}, "files": []}')
    ),
    "no UTF-8": lambda: archive_of(("bundle.json", b'{"title": "\xff"}')),
    "a bomb": lambda: lying_size(bytes(8), 1 << 30),
    "a bomb that lies": lambda: lying_size(bytes(80 << 20)),
    "many files": many,
    "many files, said to be one": lying_count,
    "a comment": lambda: archive_of(("bundle.json", GOOD))[:-2] + b"\x04\x00evil",
    "64 bits": lambda: (lambda good: good[:-22] + b"PK\6\7" + bytes(16) + good[-22:])(
        archive_of(("bundle.json", GOOD))
    ),
}


def require_refusal(path: Path, folder: Path) -> None:
    """Require a one-line error and no written files."""
    with pytest.raises(DataError) as caught:
        unpack(path, folder / "bundle")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert not folder.exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_in_one_line_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "evil.zip"
    path.write_bytes(HOSTILE[name]())
    require_refusal(path, tmp_path / "folder")
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_list_and_no_file_are_a_bundle(tmp_path: Path) -> None:
    """A bundle with a list and no other file is valid.

    Thus the archives of the tests above are refused only for their intended fault.
    """
    (tmp_path / "good.zip").write_bytes(archive_of(("bundle.json", GOOD)))
    assert unpack(tmp_path / "good.zip", tmp_path / "folder").runs == []


def test_damaged_bundles_are_refused_or_written_within_their_folder(
    compared: Path, tmp_path: Path
) -> None:
    content, draw = compared.read_bytes(), random.Random(0)
    path = tmp_path / "damaged.zip"
    for number in range(200):
        damaged = bytearray(content)
        for _ in range(draw.choice((1, 1, 3))):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged[: draw.randrange(len(damaged))] if number % 4 == 0 else damaged)
        with suppress(DataError):
            unpack(path, tmp_path / "folder" / str(number))
    inside = {name for root, _, files in os.walk(tmp_path / "folder") for name in files}
    assert inside <= {Path(name).name for name in contents(compared)}
    assert {entry.name for entry in tmp_path.iterdir()} <= {"damaged.zip", "folder"}


HEADER = json.dumps(
    {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", len(HEADER).to_bytes(8, "little") + HEADER),
        ("model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", b"\x80\x04\x95pickle"),
        ("metrics.jsonl", b"[" * 100_000 + b"\n"),
        ("metrics.jsonl", b'{"round": "1"}\n{"round": 1e400}\n'),
        ("metrics.jsonl", b""),
        ("result.json", b"{" * 100_000),
        ("result.json", b'{"files": 3, "seconds": "long"}'),
        ("task.json", b'{"metric": {"name": ["x"]}, "test_samples": "many", "digests": 4}'),
        ("configuration.json", b'{"data": 4, "seed": []}'),
        ("configuration.json", b'{"data": {"name": "digits(folder=\'a\')"}}'),
        ("environment.json", b'{"threads": "all"}'),
    ],
)
def test_files_of_a_bundle_that_no_run_wrote_end_in_one_line(
    name: str, content: bytes, compared: Path, fed: Say, tmp_path: Path
) -> None:
    files = contents(compared)
    packed(tmp_path / "odd.zip", files | {f"runs/{k}/{name}": content for k in range(4)})
    code, _, err = fed("paper", "replay", "odd.zip", "-q")
    assert code in (1, 2)
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert "FEDLOOM_TRACEBACK" not in err, err


RECORDS = sorted((ROOT / "benchmarks/records/bundles").glob("*.zip"))


def test_three_short_bundles_lie_with_the_records_and_are_replayed_before_a_change_lands(
    tmp_path: Path,
) -> None:
    assert len(RECORDS) == 3
    for path in RECORDS:
        replay = Replay(unpack(path, tmp_path / path.stem / "bundle"), tmp_path / path.stem, {})
        assert replay.described()
        assert path.stat().st_size < 1 << 20
    assert "fedloom paper replay" in (ROOT / ".ci/run").read_text()
    size = sum(
        path.stat().st_size for path in (ROOT / "benchmarks/records").rglob("*") if path.is_file()
    )
    assert size < 20 << 20


def test_a_bundle_of_no_run_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="holds no run"):
        write_bundle(tmp_path, tmp_path / "x.zip")


def test_forged_figures_are_different_whatever_sizes_the_bundle_claims(
    compared: Path, fed: Say
) -> None:
    def forge(line: dict[str, Any]) -> dict[str, Any]:
        return {key: 0.999 if key == "accuracy" else value for key, value in line.items()}

    forged = edited(Path("forged.zip"), compared, "metrics.jsonl", forge)
    small = edited(Path("small.zip"), forged, "task.json", lambda task: task | {"test_samples": 1})
    code, out, _ = fed("paper", "replay", str(small), "-q")
    assert (code, out.count("different")) == (1, 2)
    assert "test_samples 1, here" in out
    code, out, _ = fed("paper", "replay", str(forged), "-q", "--directory", "again")
    assert (code, out.count("different")) == (1, 2)
    assert "accuracy 0.999, here" in out


def test_forged_figures_of_clients_are_different(fed: Say) -> None:
    Path("job.toml").write_text(JOB)
    options = ("data.local_test=0.2", "algorithm=fedavg", "-q")
    assert fed("run", "job.toml", *options)[0] == 0
    assert fed("paper", "bundle", "runs/job/fedavg/seed-0", "--to", "clients.zip")[0] == 0

    def forge(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: forge(item) for key, item in value.items()}
        return [0.999] * len(value) if isinstance(value, list) else value

    assert "runs/0/clients.jsonl" in contents(Path("clients.zip"))
    forged = edited(Path("forged.zip"), Path("clients.zip"), "clients.jsonl", forge)
    code, out, _ = fed("paper", "replay", str(forged), "-q")
    assert (code, out.count("different")) == (1, 1), out
    code, out, _ = fed("paper", "replay", "clients.zip", "-q", "--directory", "again")
    assert (code, out.count("the same bytes")) == (0, 1)


def test_a_bundle_without_runs_is_refused_and_one_with_other_names_shows_what_ran(
    compared: Path, fed: Say
) -> None:
    Path("none.zip").write_bytes(archive_of(("bundle.json", GOOD)))
    code, _, err = fed("paper", "replay", "none.zip")
    assert (code, err.count("\n")) == (2, 1)
    assert "holds no runs" in err
    runs = json.loads(contents(compared)["bundle.json"])["runs"]
    renamed = [run | {"algorithm": "fedprox(mu=0.1)"} for run in runs]
    packed(Path("renamed.zip"), contents(compared), runs=renamed)
    code, out, _ = fed("paper", "replay", "renamed.zip", "-q")
    assert code == 0
    assert "fedprox(mu=0.1): fedavg" in out


def test_a_model_of_another_shape_is_different_in_one_line(compared: Path, fed: Say) -> None:
    files = contents(compared)
    for number in range(4):
        Path("model.safetensors").write_bytes(files[f"runs/{number}/model.safetensors"])
        tensors, metadata = read_tensors(Path("model.safetensors"))
        changed = {name: torch.cat([t, t]) for name, t in tensors.items()}
        if number % 2:
            changed.pop(min(changed))
        write_tensors(Path("model.safetensors"), changed, metadata)
        files[f"runs/{number}/model.safetensors"] = Path("model.safetensors").read_bytes()
    packed(Path("shape.zip"), files)
    code, out, err = fed("paper", "replay", "shape.zip", "-q")
    assert (code, err, out.count("different")) == (1, "", 2)
    assert "of shape (" in out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("part(of='table(path=\\'/etc/passwd\\')')", "table reads 'passwd', which no bundle holds"),
        (
            r"part(of='table(p\x61th=\'/etc/passwd\')')",
            "table reads 'passwd', which no bundle holds",
        ),
        ("table('/etc/passwd', target='y')", "table reads 'passwd', which no bundle holds"),
        ("arrays('/etc/passwd')", "arrays reads 'passwd', which no bundle holds"),
        ("images('/')", "images: no such folder"),
        ("part('images(\\'/\\')')", "images: no such folder"),
    ],
)
def test_nothing_outside_the_bundle_is_opened(
    name: str, text: str, compared: Path, fed: Say
) -> None:
    def edit(stored: dict[str, Any]) -> dict[str, Any]:
        return stored | {"data": stored["data"] | {"name": name}}

    edited(Path("read.zip"), compared, "configuration.json", edit)
    code, _, err = fed("paper", "replay", "read.zip", "-q")
    assert (code in (1, 2), err.count("\n")) == (True, 1)
    assert text in err


@pytest.mark.parametrize(
    "name",
    ["mnist(hub=true)", "part(of='mnist(hub=true)')", r"part(of='mnist(h\x75b=true)')", "mnist"],
)
def test_no_expression_asks_the_network(name: str) -> None:
    asked: list[str] = []

    def note(call: Any) -> dict[str, Any]:
        asked.extend(str(value) for key, value in call.named.items() if key == "hub")
        return dict(call.named)

    rewritten(_offline(name), note)
    assert asked == ["False"]


def test_arguments_without_a_name_are_relocated_and_all_else_stays() -> None:
    found: list[tuple[str, str, str]] = []

    def locate(name: str, parameter: str, location: str) -> str:
        found.append((name, parameter, location))
        return "/here"

    values = {
        "data": {"name": "table('/a/b.csv', target='y')", "partition": "dirichlet(0.5)"},
        "model": "mlp(hidden=[8, 4])", "algorithm": "stages(fedavg:2, fedmr(unit=segment))",
    }  # fmt: skip
    moved = relocated(values, locate)
    assert found == [("table", "path", "/a/b.csv")]
    assert parse(moved["data"]["name"]).named == {"path": "/here", "target": "y"}
    assert {**moved, "data": None} == {**values, "data": None}
    assert moved["data"]["partition"] == "dirichlet(0.5)"


def test_escaped_names_of_modules_go_into_a_bundle() -> None:
    stored = {"model": r"own_a:Net", "objective": r"classification(criterion='own_b\x3af')"}
    assert _own_modules({**stored, "m": ["own_c:f"], "n": "stages(fedavg:3, fedmr)"}) == {
        "own_a", "own_b", "own_c",
    }  # fmt: skip


def test_the_code_of_an_earlier_bundle_is_gone(tmp_path: Path) -> None:
    first = packed(tmp_path / "first.zip", {"bundle.json": GOOD, "code/helper.py": b"EVIL = 1\n"})
    second = packed(tmp_path / "second.zip", {"bundle.json": GOOD, "code/other.py": b"\n"})
    folder = tmp_path / "bundle"
    unpack(first, folder)
    (folder / "mine.txt").write_text("the user's")
    unpack(second, folder)
    assert sorted(path.name for path in (folder / "code").iterdir()) == ["other.py"]
    assert (folder / "mine.txt").exists()
