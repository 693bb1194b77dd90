"""The one error class for a user's mistake."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(ValueError):
    """A mistake in what the user asked for: one line, exit code 2, nothing started.

    ``key`` is the key as the user typed it, ``value`` what stood there, ``problem`` what is
    wrong with it (what is allowed) and ``remedy`` what to do.
    """

    def __init__(self, key: str, value: object, problem: str, remedy: str) -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        super().__init__(" ".join(f"{key}={value}: {problem}; {remedy}".split()))
