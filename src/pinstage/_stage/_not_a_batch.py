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

    _call = "wait()"
    """The call that returns the batch."""

    if not TYPE_CHECKING:  # a type checker finds it by itself

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(_says(self, f"has no {name!r}"), name=name, obj=self)

        def __getitem__(self, key: Any) -> NoReturn:
            raise TypeError(_says(self, f"cannot be indexed by {key!r}"))

        def __iter__(self) -> NoReturn:
            raise TypeError(_says(self, "cannot be iterated over"))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a transfer cannot be copied or pickled: {self!r}; copy what {self._call} returns"
        )


def _says(transfer: NotABatch, what: str) -> str:
    name = type(transfer).__name__
    return f"a {name} is a batch on its way, and {what}; call {transfer._call} for the batch"
