"""The layer that a tensor's name is of, and the names that come nearest to those of experts."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:.*?\.)??(?:layers?|blocks?|h|blk)\.(\d{1,9})\.")
_NUMBER = re.compile(r"(?:.*?\.)??(?!experts\.)[^.]+\.(\d{1,9})\.")
# Names that are listed where none is known.
_SHOWN = 8
# Words of names that experts, and what is in their place, have.
_EXPERTS = re.compile(r"(?:.*[._])?(?:moe|experts?|exps)(?![a-z])")
_FEED_FORWARD = re.compile(r"(?:.*[._])?(?:mlp|ffn|ff|feed_forward|mixer|router|gate)(?![a-z])")


def nearest(names: list[str], number: int | None) -> list[str]:
    """Return the names that are most like those of experts, of a layer if that is given.

    With experts in their names, or else feed-forward layers, or else whatever there is; of the
    layer, or else of any. Numbers of layers and experts are stars.
    """
    numbered = [(name, match) for name in names if (match := layer_of(name))]
    here = [(name, match) for name, match in numbered if number in (None, int(match[1]))]
    for group in (here, numbered):
        for like in (_EXPERTS, _FEED_FORWARD):
            found = [(name, head) for name, head in group if like.match(name[head.end() :])]
            if found:
                keep = group is here and number is not None
                return [
                    (head[0] if keep else _stars(head[0])) + _stars(name[head.end() :])
                    for name, head in found
                ]
    return [_stars(name) for name, _ in here or numbered] or [_stars(name) for name in names]


def _stars(name: str) -> str:
    """Write a star for each number."""
    return re.sub(r"(?:(?<=\.)|^)\d+(?=\.)", "*", name)


def some(names: list[str]) -> str:
    """List a few names, each once."""
    different = list(dict.fromkeys(names))
    more = len(different) - _SHOWN
    return ", ".join(different[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def layer_of(name: str) -> re.Match[str] | None:
    """Match the name of a tensor up to its layer, whose number is the first group."""
    return _LAYER.match(name) or _NUMBER.match(name)
