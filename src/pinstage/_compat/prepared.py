"""Loaders that Accelerate prepared, for `Stager.prefetch` and `wrap_loader`.

Accelerate's gradient accumulation and `gather_for_metrics` read flags of the active loader, which
describe the batch that it yielded last. Reading ahead would change them too early, so `prefetch`
refuses such loaders. This module doesn't import Accelerate. It isn't in `integrations`, since
`prefetch` would have to import it late: if an exception from another thread ends an import, the
module's lock stays held.
"""

from __future__ import annotations

import sys
from typing import Any

from ..errors import PinstageError

_REMEDY = (
    "gradient accumulation would see its end too early; let its workers stage, by "
    "pinstage.integrations.accelerate.prepare(accelerator, loader), and iterate over the result"
)


def refuse_prepared_loader(source: object) -> None:
    """Check that a source of batches isn't a prepared loader.

    Raises:
        TypeError: it is one.
    """
    if hasattr(source, "gradient_state"):
        name = type(source).__name__
        raise TypeError(f"cannot prefetch from Accelerate's {name}: {_REMEDY}")


def active_loader() -> object:
    """Return the loader that Accelerate considers active; None if there isn't any."""
    state = sys.modules.get("accelerate.state")
    return None if state is None else state.GradientState().active_dataloader


def refuse_hidden_loader(source: object, active: object) -> None:
    """Check that reading the first batch didn't begin a pass of a prepared loader.

    Args:
        source: the source of batches.
        active: the result of `active_loader` before that.

    Raises:
        PinstageError: it did.
    """
    now = active_loader()
    if now is not active:
        outside, inside = type(source).__name__, type(now).__name__
        raise PinstageError(
            f"cannot prefetch from Accelerate's {inside} through a {outside}: {_REMEDY}"
        )


def inner_loader(loader: Any) -> Any:
    """Return torch's loader inside a prepared one; any other object is returned as it is."""
    return getattr(loader, "base_dataloader", loader)


def replace_inner_loader(loader: Any, inner: Any) -> None:
    """Let a prepared loader read another loader of torch's."""
    loader.base_dataloader = inner
