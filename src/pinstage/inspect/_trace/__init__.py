"""Why a recorded training loop is slow, as far as copies are to blame.

A trace of the PyTorch profiler is read as a stream (`_stream`), what matters is kept as columns (`_events`), times are
added up by interval arithmetic (`_intervals`, `_analysis`), and a model says what packing would change (`_model`).
`_report` puts the ranks of a job together and shows them as tables, `_html` as a page.
"""

from ._html import html
from ._report import RankReport, TraceReport, sections, trace_files, trace_report

__all__ = ["RankReport", "TraceReport", "sections", "html", "trace_files", "trace_report"]
