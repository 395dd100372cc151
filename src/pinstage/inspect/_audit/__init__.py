"""What a batch is made of, what ``pin_memory=True`` would do with it, and what moving it costs.

The batch is walked as far as Python can see (`_walk`), torch's own pinning is asked what it would pin (`_pinning`),
copies are priced by the bus (`_costs`), and `_audit` puts the findings together. Nothing is moved, pinned or changed.
"""

from ._audit import Audit, audit
from ._target import first_batch

__all__ = ["Audit", "audit", "first_batch"]
