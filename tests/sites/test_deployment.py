"""The files of docs/real-sites.md are complete and have valid syntax for Docker, Kubernetes and
systemd.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedloom.sites.node_config import NodeConfig

PAGE = (Path(__file__).parents[2] / "docs" / "real-sites.md").read_text(encoding="utf-8")

FILES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE, re.M | re.S))

INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME"}


def installed(program: str) -> str | None:
    """Return the path of a program next to this Python or on the search path."""
    return shutil.which(
        program, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )


def options_of(command: str) -> set[str]:
    return {word.split("=")[0] for word in shlex.split(command)[1:] if word.startswith("--")}


def program_of(command: str) -> str:
    return Path(shlex.split(command)[0]).name


def commands() -> list[str]:
    """Return every command that the files start."""
    services = yaml.safe_load(FILES["compose.yaml"])["services"].values()
    command_lines = [service["command"] for service in services]
    for name in ("fedloom-server.service", "fedloom-site.service"):
        line = re.search(r"^ExecStart=(.*?)(?<!\\)$", FILES[name], re.M | re.S)
        assert line is not None
        command_lines.append(line[1].replace("\\\n", " ").replace("${SITE}", "2"))
    stateful = next(
        manifest
        for manifest in yaml.safe_load_all(FILES["server.yaml"])
        if manifest["kind"] == "StatefulSet"
    )
    return [
        *command_lines,
        shlex.join(stateful["spec"]["template"]["spec"]["containers"][0]["command"]),
    ]


def test_the_page_holds_every_file() -> None:
    assert FILES.keys() == {
        "fedloom-server.service",
        "fedloom-site.service",
        "Dockerfile",
        "compose.yaml",
        "server.yaml",
    }


def test_the_dockerfile_is_a_sequence_of_known_instructions() -> None:
    lines = re.sub(r"\\\n", " ", FILES["Dockerfile"]).splitlines()
    assert {line.split()[0] for line in lines} <= INSTRUCTIONS
    assert lines[0].startswith("FROM python:3.")
    for line in lines:
        if line.startswith("RUN"):
            done = subprocess.run(
                ["sh", "-n", "-c", line.removeprefix("RUN ")], capture_output=True, check=False
            )
            assert done.returncode == 0, line


def test_compose_has_a_server_and_three_sites_of_their_own() -> None:
    compose = yaml.safe_load(FILES["compose.yaml"])
    assert list(compose["services"]) == ["server", "site-0", "site-1", "site-2"]
    named = {
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service["volumes"]
    }
    assert {name for name in named if not name.startswith(".")} == compose["volumes"].keys()
    for number in range(3):
        service = compose["services"][f"site-{number}"]
        assert service["restart"] == "always"
        assert f"./keys/site-{number}:/keys:ro" in service["volumes"]


def test_docker_compose_takes_the_file(tmp_path: Path) -> None:
    plugin = (
        subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if shutil.which("docker")
        else None
    )
    if plugin is None or plugin.returncode != 0:
        pytest.skip("docker compose is missing")
    (tmp_path / "compose.yaml").write_text(FILES["compose.yaml"])
    done = subprocess.run(
        ["docker", "compose", "config", "-q"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", sorted({*map(program_of, commands())}))
def test_commands_have_options_that_flower_knows(program: str) -> None:
    if (path := installed(program)) is None:
        pytest.skip("Flower is missing")
    answer = subprocess.run([path, "--help"], capture_output=True, text=True, check=False).stdout
    used = [options_of(command) for command in commands() if program_of(command) == program]
    assert used
    assert [option for options in used for option in options if option not in answer] == []


def test_sites_are_configured_as_nodes_are() -> None:
    numbers = []
    for command in commands():
        words = shlex.split(command)
        if "--node-config" in words:
            pairs = dict(
                pair.split("=", 1) for pair in shlex.split(words[words.index("--node-config") + 1])
            )
            settings = {
                name: int(value) if value.isdigit() else value for name, value in pairs.items()
            }
            numbers.append(NodeConfig.read(settings).number)
    assert numbers == [0, 1, 2, 2]


def test_kubernetes_mounts_what_the_server_reads() -> None:
    manifests = {
        manifest["kind"]: manifest for manifest in yaml.safe_load_all(FILES["server.yaml"])
    }
    assert manifests.keys() == {"PersistentVolumeClaim", "StatefulSet", "Service"}
    spec = manifests["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }
    assert (
        manifests["Service"]["spec"]["selector"].items()
        <= manifests["StatefulSet"]["spec"]["template"]["metadata"]["labels"].items()
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is missing")
@pytest.mark.parametrize("name", ["fedloom-server.service", "fedloom-site.service"])
def test_systemd_takes_the_units(name: str, tmp_path: Path) -> None:
    binary = tmp_path / "program"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    text = re.sub(r"/opt/fedloom/bin/flower-\w+", str(binary), FILES[name])
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if name in line]
    assert complaints == []
