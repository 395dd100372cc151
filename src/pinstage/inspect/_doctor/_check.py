"""One line of the doctor's report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "info", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """What was looked at, and what was found.

    Attributes:
        name: what was looked at.
        status: ``"ok"``; ``"info"``: neither good nor bad, or not to be known here; ``"warning"``: it works, and worse
            than it could; ``"problem"``: staging or the GPU does not work as it should.
        found: what was found, with numbers.
        remedy: what to do; empty unless there is something to do.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return it as plain data."""
        return dataclasses.asdict(self)
