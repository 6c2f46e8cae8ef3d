"""Short descriptions of objects for a Python prompt and for notebooks."""

from abc import abstractmethod
from html import escape


class Described:
    """Base of objects that are shown by a few lines, not by all their tensors."""

    @abstractmethod
    def _description(self) -> dict[str, str]:
        """Return the lines of the description by their names."""

    def __repr__(self) -> str:
        lines = [f"  {name}: {text}" for name, text in self._description().items()]
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"
            for name, text in self._description().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"
