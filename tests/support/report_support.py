"""Synthetic runs for the report's tests, and a headless Chromium.

A pipe with the DevTools protocol controls Chromium.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from fedloom.report.summary import RunSummary

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 60.0


def made_up_run(
    algorithm: str, seed: int, rounds: int = 30, clients: int = 12, classes: int = 5
) -> RunSummary:
    """Make a run with plausible figures of every kind; the same arguments give the same run."""
    noise = np.random.default_rng([seed, *algorithm.encode()])
    pace = 0.05 + 0.1 * float(noise.random())
    records: list[dict[str, Any]] = [
        {
            "round": number,
            "clients": [0, 1, 2],
            "bytes_down": 1000,
            "bytes_up": 900,
            "faults": [{"client": number % 4, "reason": "dropped out"}] if number % 10 == 0 else [],
            "training_loss": float(math.exp(-pace * number) + 0.05 * noise.random()),
            "accuracy": float(0.9 - 0.8 * math.exp(-pace * number) + 0.02 * noise.random()),
            "loss": float(2 * math.exp(-pace * number) + 0.1 * noise.random()),
            "pool_cosine": float(1 - math.exp(-pace * number)),
        }
        for number in range(1, rounds + 1)
    ]
    timings: list[dict[str, Any]] = [
        {"round": record["round"], "seconds": 0.5} for record in records
    ]
    counts = noise.integers(0, 60, (clients, classes))
    configuration = {"data": {"name": "digits", "clients": clients}, "rounds": rounds, "seed": seed}
    return RunSummary(
        algorithm,
        seed,
        records,
        timings,
        counts.tolist(),
        None,
        configuration,
        {"python": "3.11", "machine": "x86_64"},
    )


def ablations_drawn(page: str) -> list[dict[str, Any]]:
    """Return the figures of parameters and settings in a report's page."""
    match = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL
    )
    assert match is not None
    return [
        slot["variants"][""]
        for name, slot in json.loads(match[1]).items()
        if name.startswith("ablation")
    ]


class Browser:
    """A headless Chromium with one page; `errors` collects all errors of its console."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        command_end, self._write = os.pipe()
        self._read, answer_end = os.pipe()
        options = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage "
            "--no-first-run --remote-debugging-pipe"
        )
        # The protocol uses the descriptors 3 and 4.
        script = f'exec "$0" {options} "$@" 3<&{command_end} 4>&{answer_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(command_end, answer_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_end)
        os.close(answer_end)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(
        self,
        path: Path,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        phone: bool = False,
    ) -> float:
        """Load a page from disk, wait until all figures are drawn, and return the seconds."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.errors.clear()
        self.requests.clear()
        began = time.perf_counter()
        self.call("Page.navigate", url=path.as_uri())
        while (
            self.run("location.href + '|' + (document.documentElement?.dataset.drawn ?? '')")
            != f"{path.as_uri()}|all"
        ):
            assert time.perf_counter() - began < SECONDS, "the figures were not drawn in time"
            time.sleep(0.02)
        return time.perf_counter() - began

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        image = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(image))

    def pdf(self) -> bytes:
        """Return the printed page."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            chunk = os.read(self._read, 1 << 20) if ready else b""
            assert chunk, "Chromium does not answer"
            self._rest += chunk
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, details: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"]))
        elif event == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.errors.append(details["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and details["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(json.dumps(details["args"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
