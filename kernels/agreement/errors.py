"""What a rank raises about its peers."""

from __future__ import annotations


class PeerTimeout(TimeoutError):
    """A peer did not do its part of a call in time; the message names rank, chunk and call."""


class PeerLeft(PeerTimeout):
    """A peer's operation is broken: it comes to no further call."""


class RefusedByPeer(ValueError):
    """A peer has refused the call, as all hosts know: nobody has begun it."""
