"""The page of the documentation that says which methods and wrappers combine: python tests/seams/page.py writes it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if __name__ == "__main__":  # as a program: as pytest, which finds the tests' modules
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fedloom.parts.building import build
from seams.cases import PARAMETERS, WRAPPERS, methods, pair_refusal

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"

SHORT = {
    "none": "alone", "clustered by size": "clustered, size", "robust median": "median", "robust trimmed_mean": "trimmed",
    "robust krum": "krum", "robust multi_krum": "multi-krum", "robust clipping": "clipping",
    "quantised down": "down", "coded twice": "both", "stages, first": "first", "stages, later": "later", "stages, auto": "auto",
    "fedmr, local": "local",
}  # fmt: skip
"""Heads of the columns that are not the wrapper's name."""

COLUMNS = [wrapper for wrapper in WRAPPERS if wrapper != "none"]

HEAD = """# Which methods combine

Every method was run in every wrapper for some rounds: with all clients present, with some missing, late or refused, with one
client and with none, with batch norm, frozen parameters and single precision, uninterrupted, and killed and resumed. Each
round was compared with the definitions of method and wrapper, computed in plain loops from what the clients were sent and
uploaded. A combination marked *yes* agreed with them. Any other is refused before the first round, in one line, for the
reason below the table. `make test` runs a selection in which every pair of values of method, wrapper, attendance, model and
course occurs, `make chaos` others for as long as it is given. A method that you register is included in both, and its test
says where to write its definition.

The columns are these:

{legend}

{head}
{rows}

## Why not

A wrapper's reason is the same for all the methods that stand beside it.
"""


def title(wrapper: str) -> str:
    return SHORT.get(wrapper, wrapper)


def shown(method: str) -> str:
    """The method as the page names it: without the parameters that suit small federations."""
    return next((name for name, expression in PARAMETERS.items() if expression == method), method)


def row_of(method: str) -> str:
    """The line of one method in the table."""
    marks = ["" if pair_refusal(method, wrapper) else "yes" for wrapper in COLUMNS]
    return f"| `{shown(method)}` | {' | '.join(marks)} |"


def reason_of(method: str, wrapper: str) -> str:
    """Return why a wrapper refuses a method, with `M` for the method's own expression."""
    reason = pair_refusal(method, wrapper)
    names = {method, shown(method)}
    try:
        names.add(str(build(method)))
    except Exception:  # it is refused alone
        return reason
    for name in sorted(names, key=len, reverse=True):
        reason = re.sub(rf"(?<![\w`]){re.escape(name)}(?![\w`])", "M", reason)
    return reason


def page() -> str:
    """Return the text of the page."""
    every = methods()
    head = f"| method | {' | '.join(map(title, COLUMNS))} |\n|---|{'---|' * len(COLUMNS)}"
    legend = "\n".join(f"- {title(wrapper)}: `{WRAPPERS[wrapper].format('M')}`" for wrapper in COLUMNS)
    text = HEAD.format(legend=legend, head=head, rows="\n".join(map(row_of, every)))
    for wrapper in COLUMNS:
        reasons: dict[str, list[str]] = {}
        for method in every:
            if pair_refusal(method, wrapper):
                reasons.setdefault(reason_of(method, wrapper), []).append(f"`{shown(method)}`")
        if reasons:
            text += f"\n### {WRAPPERS[wrapper].format('M')}\n\n"
            text += "".join(f"- {reason}. Methods: {', '.join(names)}\n" for reason, names in reasons.items())
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
