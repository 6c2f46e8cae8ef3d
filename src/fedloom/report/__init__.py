"""What finished runs leave for people: numbers (`summary`), tables, figures and one self-contained page."""

from fedloom.report.page import write_report
from fedloom.report.summary import RunSummary, summarise

__all__ = ["RunSummary", "summarise", "write_report"]
