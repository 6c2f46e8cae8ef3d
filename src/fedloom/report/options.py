"""Options of a report page, which the page holds so that it can be written again."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from fedloom.report.sheet import Sheet
from fedloom.report.summary import LAST, TargetValue


@dataclass(frozen=True)
class ReportOptions:
    """Options of a page, which it holds so that it can be written again."""

    title: str
    targets: tuple[TargetValue, ...] = ()
    command: str = ""
    last: int = LAST
    against: str = "best"
    measure: str = "last"

    @classmethod
    def of(cls, title: str, sheet: Sheet, command: str) -> "ReportOptions":
        """Return the options of a page about this setting, or about several that begin with it.

        Args:
            title: Title of the page.
            sheet: The setting, or the first of several.
            command: The command that repeats the runs; "" for none.

        Returns:
            The options, with the targets and the measure of the sheet.
        """
        targets = tuple(sheet.targets)
        return cls(title, targets, command, sheet.last, sheet.against, sheet.measure)


def options_of(path: Path) -> ReportOptions | None:
    """Return the options of the report at `path`; None where there is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    match = re.search(r'<script type="application/json" id="about">(.*?)</script>', text, re.DOTALL)
    try:
        options = json.loads(match[1]) if match else {}
        return ReportOptions(**{**options, "targets": tuple(options["targets"])})
    except (ValueError, TypeError, KeyError):
        return None  # a page of something else
