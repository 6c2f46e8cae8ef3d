"""What finished runs are shown as: figures of runs (`summary`), tables, drawings and one self-contained page."""

from fedloom.report.page import write_report
from fedloom.report.summary import RunSummary, summarise

__all__ = ["RunSummary", "summarise", "write_report"]
