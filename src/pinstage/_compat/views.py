"""The extension's access to tensors, and its views of slabs, through torch's C shim."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _native
from ..errors import LayoutError, PinstageError
from .probes import WRONG, in_this_torch, warn_once


def is_dual(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a tangent of forward-mode AD."""
    dual: Any = torch.autograd.forward_ad
    level = getattr(dual, "_current_level", None)
    if type(level) is int and level < 0:  # no level is open, so no tensor has a tangent
        return False
    return dual.unpack_dual(tensor).tangent is not None


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory of its own: one of torch.func, such as inside vmap, a
    wrapper of functionalisation, zeros of forward-mode AD, or one whose layout isn't strided.
    """
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return True
    kinds = (
        getattr(torch, "_is_functional_tensor", None),
        getattr(torch.Tensor, "_is_zerotensor", None),
    )
    return any(is_one is not None and is_one(tensor) for is_one in kinds)


def check_dtype(dtype: Any) -> None:
    """Refuse a dtype that bytes in memory can't have.

    Raises:
        TypeError: it isn't a dtype of torch, or it is quantised. torch would make a tensor without
            scale and zero point, and end the process when that tensor is used.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"not a dtype of torch: {dtype!r}; pass one such as torch.float32")
    # qint8, quint4x2, ...: all quantised dtypes, and no others
    if str(dtype).startswith("torch.q"):
        raise TypeError(
            f"memory can't be a tensor of {dtype}: a quantised tensor also has a scale and a zero "
            "point; take its integers (torch.int8, torch.uint8, torch.int32)"
        )


def checked_sizes(
    shape: int | Sequence[int] | None, dtype: torch.dtype, offset: int, nbytes: int
) -> tuple[int, ...]:
    """Return the sizes of a tensor within memory.

    Args:
        shape: the tensor's; None for all elements from `offset` on, in one dimension.
        dtype: the tensor's.
        offset: the first byte.
        nbytes: the bytes of the memory.

    Raises:
        TypeError: as `check_dtype`.
        ValueError: it doesn't fit the memory.
    """
    check_dtype(dtype)
    unit = dtype.itemsize
    if shape is None:
        shape = max(nbytes - offset, 0) // unit
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    needed = math.prod(sizes) * unit
    if min((offset, *sizes)) < 0 or offset % unit or offset + needed > nbytes:
        raise ValueError(
            f"a tensor of shape {list(sizes)} and {dtype} doesn't fit: {needed} bytes from byte "
            f"{offset} of {nbytes}; pass sizes that are not negative and an offset that is a "
            f"multiple of {unit}, or ask for less"
        )
    return sizes


def tensor_over(
    memory: Any,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """Return a tensor over writable memory, which it keeps alive; an empty one has no memory.

    Args:
        memory: has the buffer protocol.
        dtype: for which `check_dtype` has passed.
        shape: the tensor's; its sizes aren't negative.
        stride: in elements; dense. None for a contiguous tensor.
        offset: the first byte, a multiple of the dtype's size.
    """
    count = math.prod(shape)
    if count:
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    else:
        flat = torch.empty(0, dtype=dtype, device="cpu")  # whatever the default device
    return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def view_of(
    storage: torch.UntypedStorage,
    begin: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Return a tensor over a storage, from its byte `begin` on.

    ``as_strided`` isn't used: its views share one version counter.

    Args:
        storage: on any device.
        begin: a multiple of the dtype's size.
        dtype: the tensor's.
        shape: the tensor's.
        stride: in elements.
    """
    view = torch.empty(0, dtype=dtype, device=storage.device)
    check_is_plain(view)
    return view.set_(storage, begin // view.itemsize, shape, stride)


def check_is_plain(made: torch.Tensor) -> None:
    """Refuse an object that torch made in place of a plain tensor or view.

    Raises:
        PinstageError: torch is in a mode in which it makes something else.
    """
    if type(made) is not torch.Tensor:
        raise PinstageError(
            "cannot stage where torch makes no memory of its own: it made a "
            f"{type(made).__name__}; leave the mode (FakeTensorMode, say), or move the batch by "
            ".to()"
        )


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's bytes begin in its storage, and where they end; zeros for an empty
    tensor.
    """
    if not tensor.numel():
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * step for size, step in steps)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def check_has_memory(tensor: torch.Tensor, path: Callable[[], str]) -> None:
    """Check that a tensor's storage is large enough for it.

    Raises:
        LayoutError: it isn't; `path` returns where the tensor is in the batch.
    """
    _, needed = range_of(tensor)
    held = tensor.untyped_storage().nbytes()
    if needed and (held < needed or not tensor.data_ptr()):
        raise LayoutError(
            f"batch{path()} lacks the memory for its shape: {needed} bytes of "
            f"{list(tensor.shape)} in a storage of {held}; it was freed or cut by resize_() of its "
            "storage: stage it before, or fill it again",
            path(),
        )


_why_slow: list[str | None] = [None]


def why_tensors_are_slow() -> str | None:
    """Return why torch's public functions describe and make tensors, one by one; None if the
    extension does it.
    """
    return _why_slow[0]


def warn_of_tensors() -> None:
    """Warn, once, if the extension describes and makes tensors by torch's public functions."""
    if _why_slow[0] is not None:
        warn_once(
            f"tensors are described and made in Python, which takes longer: {_why_slow[0]}; see "
            "`pinstage doctor`"
        )


def learn_tensors(samples: dict[int, torch.Tensor]) -> None:
    """Pass the extension the addresses of torch's C shim, and where a tensor object has its C++
    tensor; probe both.

    The shim (``aoti_torch_*``) and the exchange of tensors by DLPack are stable; torch doesn't
    promise that a tensor object holds an ``at::Tensor``, nor where, nor ``THPVariable_Wrap``, the
    functions for a tensor's flags, and the counter of modes. If one of them does something else,
    tensors are described and made by torch's public functions.

    Args:
        samples: a tensor of each dtype, by the dtype's code in tables.
    """
    core = _native.core
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            _why_slow[0] = _probe_tensors(core, samples)
    except WRONG as error:
        _why_slow[0] = in_this_torch(f"doesn't behave as expected of its C shim ({error!r})")
    if _why_slow[0] is not None:
        core.use_handle(0)


_FUNCTIONS = (
    "aoti_torch_get_storage_size",
    "aoti_torch_get_storage_offset",
    "aoti_torch_get_dtype",
    "aoti_torch__reinterpret_tensor",
    "aoti_torch__alloc_from_pool",
    "aoti_torch_empty_strided",
    "aoti_torch_get_data_ptr",
    "aoti_torch_delete_tensor_object",
    "_Z16THPVariable_WrapON2at10TensorBaseE",
    "_ZN2at25compositeimplicitautograd6is_negERKNS_6TensorE",
    "_ZN2at25compositeimplicitautograd7is_conjERKNS_6TensorE",
    "_ZNK3c1010TensorImpl13requires_gradEv",
)
"""Functions of torch that the extension calls, in the order of ``_native/core.h``."""


def _addresses() -> tuple[int | None, ...]:
    path = Path(torch.__file__).parent / "lib" / "libtorch_python.so"
    # Finds functions of its dependencies, too.
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS)


def _probe_tensors(core: Any, samples: dict[int, torch.Tensor]) -> str | None:
    """Compare the extension's descriptions of tensors, and the tensors it makes, with torch's;
    return what differs.

    Nothing here starts autograd's engine: that would ask CUDA for the number of devices, and then a
    forked process could not use CUDA.
    """
    slab, unit = torch.arange(256, dtype=torch.uint8, device="cpu"), ctypes.sizeof(ctypes.c_void_p)
    imaginary = torch.zeros(3, dtype=torch.complex64, device="cpu").conj()
    tensors = [
        slab,
        slab[64:128],
        slab.view(torch.float32).requires_grad_(),
        imaginary,
        imaginary.imag,
    ]
    offsets = range(object.__basicsize__, torch.Tensor.__basicsize__, unit)
    words = (
        {at for at in offsets if ctypes.c_size_t.from_address(id(one) + at).value == one._cdata}
        for one in tensors
    )
    level, modes = (torch.autograd.forward_ad, "_current_level"), torch._C._len_torch_dispatch_stack
    core.use_torch(torch.Tensor.__dlpack_c_exchange_api__, _addresses(), *level, modes)
    core.use_handle(min(set.intersection(*words)))
    for tensor in tensors:
        size, offset, _, *flags = core.facts(tensor)
        if (size, offset) != (tensor.untyped_storage().nbytes(), tensor.storage_offset()):
            return in_this_torch("reports another size of a storage through its C shim")
        if flags != [tensor.requires_grad, tensor.is_neg(), tensor.is_conj()]:
            return in_this_torch("reports other flags of a tensor through its C++ functions")
    numbers = {code: core.facts(sample)[2] for code, sample in samples.items()}
    if len(set(numbers.values())) < len(numbers):
        return in_this_torch("doesn't distinguish dtypes in its C shim")
    for code, number in numbers.items():
        core.add_scalar(code, number)
    if type(getattr(*level)) is not int:  # opening one would disturb other threads
        return in_this_torch("doesn't report whether a level of forward-mode AD is open")
    return _probe_modes(modes) or _probe_views(core, slab)


def _probe_modes(modes: Callable[[], int]) -> str | None:
    """Check that a function counts the modes that torch is in."""
    before = modes()
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        inside = modes()
    if (type(before), inside, modes()) != (int, before + 1, before):
        return in_this_torch("doesn't report whether it makes views or something else")
    return None


def _probe_views(core: Any, slab: torch.Tensor) -> str | None:
    """Cut a slab into views, copy it to tensors, and check that both are what torch would make."""
    expected = [slab.view(torch.float32)[at : at + 16].view(4, 4).t() for at in (0, 16)]
    (table, *_), *_ = core.describe(expected, frozenset(), None, (1, 0), True)
    changed, saved = views = core.Blocks.of(table, 0, 0, 0, slab).leaves([])
    blocks = core.Blocks.of(table, 2, 0, 0)
    blocks.copy(slab.data_ptr(), 0, 256, 0, False)
    for made, like in zip([*views, *blocks.leaves([])], expected * 2, strict=True):
        is_view = any(made is view for view in views)
        is_same = type(made) is torch.Tensor and torch.equal(made, like)
        memory = made.data_ptr() == like.data_ptr(), made.untyped_storage().nbytes()
        facts = made.stride(), *memory, made._base, made._version, made.requires_grad
        expected_facts = like.stride(), is_view, 256 if is_view else 64, None, 0, False
        if not is_same or facts != expected_facts:
            return in_this_torch("makes other tensors by its C shim than by its own methods")
    product: Any = saved * torch.ones(4, 4, requires_grad=True, device="cpu")
    changed.zero_()
    if (slab._version, saved._version, changed._version) != (0, 0, 1) or slab[:64].any():
        return in_this_torch(
            "makes views by its C shim that share their version, or not their memory"
        )
    [_, gradient] = product.grad_fn(torch.ones(4, 4, device="cpu"))
    if not torch.equal(gradient, saved):
        return in_this_torch("does not keep a view by its C shim for autograd")
    return None
