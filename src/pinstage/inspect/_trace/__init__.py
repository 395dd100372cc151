"""Why a recorded training loop is slow, as far as copies are to blame.

A trace of the PyTorch profiler is read as a stream (`_stream`), what matters is kept as columns (`_events`), times are
added up by interval arithmetic (`_intervals`, `_analysis`), a model says what packing would change (`_model`), and the
findings are said in two sentences (`_verdict`), shown (`_show`) and drawn (`_svg`, `_html`); `_ranks` puts it together.
"""

from ._html import html
from ._ranks import RankReport, TraceReport, trace_files, trace_report
from ._show import blocks

__all__ = ["RankReport", "TraceReport", "blocks", "html", "trace_files", "trace_report"]
