"""Measure the time to write a report, and to load and draw it in a headless Chromium.

The report has 20 runs of 1,000 rounds.

python benchmarks/report_page.py [--loads 5]    (needs Debian's chromium on the path)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from fedloom.report.page import render, write_page
from outcome import tell

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from report_support import Browser, made_up_run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        for name, runs, rounds, clients in (("12 x 40", 12, 40, 20), ("20 x 1000", 20, 1000, 100)):
            path = Path(folder) / "report.html"
            summaries = [made_up_run(f"method{k}", 0, rounds, clients, 10) for k in range(runs)]
            began = time.perf_counter()
            write_page(path, render(name, summaries, (0.5, 0.8)))
            written = time.perf_counter() - began
            loads = [browser.open(path) for _ in range(arguments.loads)]
            rows.append({
                "runs_x_rounds": name,
                "megabytes": path.stat().st_size / 1e6,
                "write_s": written,
                "first_load_s": loads[0],
                "later_load_s": statistics.median(loads[1:] or loads),
            })  # fmt: skip
    tell("report page", rows)


if __name__ == "__main__":
    main()
