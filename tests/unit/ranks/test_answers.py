"""Answers of a rank that comes to a call, or to its end, while it reads a question about that call."""

from unittest import mock

import pytest
import torch.distributed as dist

from dist_autotune.ranks.questions import CallCount, Letter, _Listener


class Moving(CallCount):
    """A count whose rank begins to ask, and goes on, between two looks at it."""

    looks = 0

    def place(self, _=None):
        self.looks += 1
        self.asks_before = self.asks_behind = int(self.looks > 1)
        return self.asks_before


@pytest.mark.parametrize(("begins", "place"), [(False, "ended"), (True, "begun")])
def test_a_rank_that_begins_to_ask_while_a_letter_is_read_does_not_refuse(begins, place, monkeypatch):
    monkeypatch.setattr(Moving, place, property(Moving.place, lambda self, value: None), raising=False)
    store, letter = dist.HashStore(), Letter("s", 1, 0, (0, 1), begins)
    count = Moving(mock.Mock(), "s", (0, 1), 1, mock.Mock(), mock.Mock())
    answering = _Listener({"s": count}, set(), 1)._answered(store, letter)
    for _ in answering:
        pass
    assert not any(store.check([letter.key(part)]) for part in ("", "/left"))
