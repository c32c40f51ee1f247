"""The hub without sockets: messages and ranks only."""

import pytest

from dist_autotune.ranks.hub import HubState

MERGED = {"merged": b"all"}


def joined(payloads):
    return {"merged": b" ".join(payloads)}


class Ranks:
    """The messages of all ranks to the state of one hub, and what each was told."""

    def __init__(self, size):
        self.state = HubState(range(size))
        self.told = {rank: [] for rank in range(size)}
        self.replies = {rank: self.told[rank].append for rank in range(size)}

    def send(self, rank, op, sequence=0, **fields):
        asks = {} if op == "beat" else {"id": 1}
        if op == "post":
            fields = {"payload": b"x", **fields}
            self.state.merges[sequence] = joined
        message = {"op": op, "rank": rank, "sequence": sequence, **asks, **fields}
        self.state.handle(message, self.replies[rank])

    def give_up(self, rank, sequence=0, is_patient=True):
        self.send(rank, "give up", sequence, end={"by": rank}, is_patient=is_patient)


# ---- the state


@pytest.mark.parametrize("end", [MERGED, {"failed": 0}], ids=["merged", "failed"])
def test_who_asks_again_when_everybody_has_been_told_gets_the_same_end(end):
    # A rank may be interrupted, or give up, in the moment in which it is told.
    ranks = Ranks(2)
    ranks.send(1, "post")
    ranks.send(0, "publish", end=end)
    assert len(ranks.state) == 0
    ranks.send(1, "publish", end={"failed": 1})
    ranks.give_up(1)
    ranks.send(0, "post")
    ranks.send(1, "beat")
    assert [told["end"] for told in ranks.told[0] + ranks.told[1]] == [end] * 5
    assert len(ranks.state) == 0


def test_beats_of_a_missing_rank_buy_patience_once_each():
    ranks = Ranks(3)
    ranks.send(0, "post")
    ranks.send(2, "beat")
    ranks.give_up(0)
    assert ranks.told[0] == [{"id": 1, "wait": True}]
    ranks.give_up(1)  # another rank has not seen that beat
    assert ranks.told[1] == [{"id": 1, "wait": True}]
    ranks.give_up(0)
    assert ranks.told[0][-1]["end"]["missing"] == [1, 2]


def test_a_rank_whose_connection_was_lost_when_the_others_were_told_may_still_ask():
    ranks = Ranks(2)
    ranks.send(0, "post")
    ranks.send(1, "post")  # answered, though nobody may have read it
    ranks.send(0, "post", 1)
    ranks.send(1, "post")
    assert ranks.told[1] == [{"id": 1, "end": {"merged": b"x x"}}] * 2
