"""The order of calls that share memory and come on several streams."""

from __future__ import annotations

import torch


class StreamOrder:
    """Orders a call behind the last one where it comes on another stream: the device waits, no host does.

    Calls on one stream cost a comparison. A captured call is ordered behind the others of its capture, an
    eager one behind the last eager one: a capture begins and ends behind what its host orders, and where
    graphs are replayed the caller orders them.
    """

    def __init__(self) -> None:
        self._last: dict[bool, int] = {}  # the stream of the last call, by whether it was captured

    def follow(self, device: torch.device) -> None:
        """Order what the current stream is given from now on behind the last call."""
        is_capturing = torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(device)
        before, self._last[is_capturing] = self._last.get(is_capturing), stream.cuda_stream
        if before is None or before == stream.cuda_stream:
            return
        event = torch.cuda.Event()
        with torch.cuda.stream(torch.cuda.ExternalStream(before, device)):
            if is_capturing and not torch.cuda.is_current_stream_capturing():
                return  # that was another capture, which has ended
            event.record()
        stream.wait_event(event)
