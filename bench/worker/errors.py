"""How an exception becomes a status and a one-line cause."""

from __future__ import annotations

import torch

__all__ = ["describe", "is_out_of_memory"]

_MEMORY_WORDS = ("can't allocate memory", "out of memory", "not enough memory", "cannot allocate memory")


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or what caused it, is an allocator that found no room."""
    return any(
        isinstance(e, MemoryError | torch.OutOfMemoryError)
        or (isinstance(e, RuntimeError | OSError) and any(w in str(e).lower() for w in _MEMORY_WORDS))
        for e in _chain(error)
    )


def describe(error: BaseException) -> tuple[str, str]:
    """(status, one-line reason): the root of the ``__cause__`` chain."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = " ".join(str(root).split())
    reason = f"{type(root).__name__}: {text}"[:400] if text else type(root).__name__
    return ("oom" if is_out_of_memory(error) else "error"), reason
