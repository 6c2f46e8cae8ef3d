"""The builds of `make dist`: a wheel with every file of the package, and a source archive that can
run the tests.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fedloom

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def files(*folders: str) -> set[str]:
    """Return every file below these folders as a path relative to the root."""
    paths = (
        path
        for folder in folders
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]
        if path.is_file()
    )
    return {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}


def test_the_wheel_holds_every_file_of_the_package(built: Path) -> None:
    (wheel,) = built.glob(f"fedloom-{fedloom.__version__}-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if not name.startswith("fedloom-")}
    assert package == {name.removeprefix("src/") for name in files("src/fedloom")}
    assert f"fedloom-{fedloom.__version__}.dist-info/licenses/LICENSE" in names


def test_the_source_archive_holds_what_building_and_testing_need(built: Path) -> None:
    (archive,) = built.glob(f"fedloom-{fedloom.__version__}.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    needed = files(
        "src",
        "tests",
        "docs",
        "examples",
        "benchmarks",
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
    )
    assert names >= needed | files("README.md", "LICENSE", "CHANGELOG.md", "mkdocs.yml", ".ci")


def test_the_version_is_the_same_everywhere() -> None:
    for name in ("pyproject.toml", "CITATION.cff"):
        assert any(
            line.split("=")[-1].split(":")[-1].strip(' "') == fedloom.__version__
            for line in (ROOT / name).read_text().splitlines()
            if line.startswith("version")
        ), name
