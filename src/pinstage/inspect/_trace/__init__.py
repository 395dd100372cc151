"""Shows how far copies slow down a recorded training loop.

`_events` reads a trace of the PyTorch profiler as a stream, and keeps relevant events as columns.
`_analysis` adds up times as sets of cells. `_model` estimates the saving by packing.
"""

from ._report import TraceReport, trace_report
