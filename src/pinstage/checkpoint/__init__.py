"""Staging of state dicts for ``torch.distributed.checkpoint.async_save``, in slabs of a pool.

::

    state_dict --take--> tensors, and a message with everything else (`_snapshot`)
    tensors --to_host--> one slab, leased; `CheckpointStager.stage` returns here (`_stager`)
    event --in a thread--> tensors over the slab, as the message describes them (`_staged`)
    --> the writer: a thread, or a process that maps the slab; then the slab returns to the pool
"""

from ._stager import CheckpointStager

__all__ = ["CheckpointStager"]
