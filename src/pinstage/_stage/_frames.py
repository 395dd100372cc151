"""References that errors keep."""

from __future__ import annotations

import contextlib
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


def clear_own_frames(error: BaseException) -> None:
    """Drop the local variables of this package's frames that an error keeps: views would keep their
    slab busy.

    Frames of the user's code keep theirs, for a debugger.
    """
    traceback = error.__traceback__
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if frame.f_code.co_filename.startswith(_PACKAGE):
            with contextlib.suppress(RuntimeError):  # the frame is still running
                frame.clear()
