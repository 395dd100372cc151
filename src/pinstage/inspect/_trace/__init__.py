"""Why a recorded training loop is slow, as far as copies are to blame.

A trace of the PyTorch profiler is read as a stream, and what matters is kept as columns (`_events`), times are added
up by interval arithmetic (`_analysis`), and a model says what packing would change (`_model`).
"""

from ._report import TraceReport, trace_report

__all__ = ["TraceReport", "trace_report"]
