"""`HostRegion`: a large page-locked range that lives as long as its program.

The pool serves many short uses; a region is one allocation of an exact size for caches, weights and
optimizer states. It is mapped at once, and touched and page-locked chunk by chunk in the
background, so that neither this process nor its neighbours on the GPU are stopped meanwhile.
`_chunks` does that, and frees the memory at the end; `_places` decides where tensors are and chunks
end; `_region` has the public classes.
"""

from ._chunks import pieces_at, pieces_of
from ._region import HostRegion, RegionHandle
