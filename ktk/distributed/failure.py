"""What a rank hears of another one that does not go on."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Reason(IntEnum):
    """Why a rank does not go on."""

    ENDED = 1
    SILENT = 2
    RAISED = 3


class RankFailed(RuntimeError):
    """A rank of a group has ended or hangs, so that no result of the group can be complete.

    Attributes
    ----------
    ranks : tuple of int
        Those that failed, as ranks of the group that the layer was made with.
    reason : Reason
    """

    def __init__(self, ranks: Iterable[int], reason: Reason, timeout: float, told_by: int = -1):
        self.ranks = tuple(sorted(ranks))
        self.reason = reason
        self.timeout = timeout
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        what = {
            Reason.ENDED: "ended, or closed the connection",
            Reason.SILENT: f"sent nothing for {timeout:g} s: stopped, stuck, or too busy",
            Reason.RAISED: "raised an error in the middle of a call, which its own output has",
        }[reason]
        told = f" (rank {told_by} says)" if told_by >= 0 else ""
        super().__init__(
            f"{who} {what}{told}; experts are missing without it, so start all ranks anew"
        )
