"""What `generate` is given to follow a reply, and to end it."""

from __future__ import annotations

import pytest
import torch

from ktk.text.stream import Stop


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_whether_to_end_is_told_where_the_tokens_are(device: str) -> None:
    ids = torch.zeros(3, 5, dtype=torch.int64, device=device)
    done = Stop(lambda: True)(ids, None)
    assert (done.shape, done.dtype, done.device) == ((3,), torch.bool, ids.device)


@pytest.mark.parametrize("asked", [False, True])
def test_a_reply_ends_when_that_is_asked(asked: bool) -> None:
    assert Stop(lambda: asked)(torch.zeros(2, 1), None).tolist() == [asked] * 2
