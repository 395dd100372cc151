"""Errors for a transfer that is used like its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # typing's has no default before Python 3.13

    B_co = TypeVar("B_co", covariant=True, default=Any)
    """The batch of a transfer."""
else:
    from typing import TypeVar

    B_co = TypeVar("B_co", covariant=True)


class NotABatch:
    """A base of transfers: an operation that only its batch supports raises an error that names the
    missing call.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker finds it by itself

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{_missing(self)}has no {name!r}; call wait() for the batch", name=name, obj=self
            )

        def __getitem__(self, key: Any) -> NoReturn:
            raise TypeError(
                f"{_missing(self)}cannot be indexed by {key!r}; call wait() for the batch"
            )

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{_missing(self)}cannot be iterated over; call wait() for the batch")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a transfer cannot be copied or pickled: {self!r}; copy what wait() returns"
        )


def _missing(transfer: NotABatch) -> str:
    return f"a {type(transfer).__name__} is a batch on its way, and "
