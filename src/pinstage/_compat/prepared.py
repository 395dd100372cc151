"""Loaders that Accelerate prepared, for `Stager.prefetch` and `wrap_loader`.

Accelerate's gradient accumulation and `gather_for_metrics` read flags of the active loader, which
describe the loop's batch. This module doesn't import Accelerate. It isn't in `integrations`, since
`prefetch` would have to import it late: if an exception from another thread ends an import, the
module's lock stays held.
"""

from __future__ import annotations

import sys
from typing import Any

from ..errors import PinstageError

_FLAGS = ("end_of_dataloader", "remainder")


def is_prepared(source: object) -> bool:
    """Return whether a source of batches is a prepared loader."""
    return hasattr(source, "gradient_state")


def flags_of(source: object) -> dict[str, Any]:
    """Return the flags of a source by their names; none unless it is a prepared loader."""
    return {name: getattr(source, name) for name in _FLAGS} if is_prepared(source) else {}


def is_last(flags: dict[str, Any]) -> bool:
    """Return whether flags mark their batch as the last one."""
    return bool(flags.get("end_of_dataloader"))


def active_loader() -> object:
    """Return the loader that Accelerate considers active; None if there isn't any."""
    state = sys.modules.get("accelerate.state")
    return None if state is None else state.GradientState().active_dataloader


def refuse_hidden_loader(source: object, active: object) -> None:
    """Check that reading the first batch didn't begin a pass of a prepared loader other than the
    source itself.

    Args:
        source: the source of batches.
        active: the result of `active_loader` before that.

    Raises:
        PinstageError: it did, and that loader's flags couldn't be set.
    """
    now = active_loader()
    if now is not active and now is not source:
        outside, inside = type(source).__name__, type(now).__name__
        raise PinstageError(
            f"cannot prefetch from Accelerate's {inside} through a {outside}: gradient "
            "accumulation would see its end too early; call stager.prefetch(loader) with the "
            f"prepared loader, and put the {outside} around that"
        )


def inner_loader(loader: Any) -> Any:
    """Return torch's loader inside a prepared one; any other object is returned as it is."""
    return getattr(loader, "base_dataloader", loader)


def replace_inner_loader(loader: Any, inner: Any) -> None:
    """Let a prepared loader read another loader of torch's."""
    loader.base_dataloader = inner
