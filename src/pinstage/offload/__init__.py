"""What else of a training job can lie on the host: activations between forward and backward.

::

    forward   saves a tensor --copy, on a stream of ours--> slab of the pool      its memory goes back to the allocator
    backward  asks for it    <-copy, on another one-------- slab of the pool      those saved before it set out, too

Where to look: `_saving` has the context manager, and says what stays; `_optimizer` does the same for an optimizer's
state; `_trail` has what autograd keeps in the place of a tensor, what was saved in which order, and what comes back
next; `_away` a piece of memory that has gone; `pinstage._stage._shuttle` the streams.
"""

from ._optimizer import OffloadedState, optimizer_state
from ._saving import save_on_cpu
from ._trail import OffloadStats

__all__ = ["OffloadStats", "OffloadedState", "optimizer_state", "save_on_cpu"]
