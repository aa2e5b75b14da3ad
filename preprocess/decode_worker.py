"""The decoder process: reads requests from standard input, answers on standard output, ends when its parent does.

A message is a length (8 bytes, big-endian), that many bytes of JSON, and then the raw frames of the `shape` that it
states, if any. `python -m mmspeed.preprocess.decode_worker` starts it; it imports no torch, to start in a moment.

Legend: F frames, H W height and width in pixels.
"""

from __future__ import annotations

import json
import os
import queue
import struct
import sys
import threading
import traceback
from typing import Any, BinaryIO

import av.logging
import numpy as np

from mmspeed.preprocess.decode import decode
from mmspeed.preprocess.probe import Probe, allow_large_pictures, probe
from mmspeed.preprocess.reasons import Reason, Rejected
from mmspeed.preprocess.source import Source

HEADER = struct.Struct(">Q")


def pack(message: dict[str, Any]) -> bytes:
    """A message without raw bytes, or the part of it before them."""
    text = json.dumps(message).encode()
    return HEADER.pack(len(text)) + text


def main() -> None:
    """Serve requests until standard input ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the messages
    allow_large_pictures()
    av.logging.set_level(av.logging.PANIC)
    pending: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_receive, args=(requests, pending), daemon=True).start()
    answers.write(pack({"ready": os.getpid()}))
    answers.flush()
    held: tuple[Source, Probe] | None = None
    while True:
        request = pending.get()
        source = source_from_json(request["source"])
        reply: dict[str, Any]
        frames_FHWC: np.ndarray | None = None
        try:
            if held is None or held[0] != source or request["command"] == "open":
                held = source, probe(source, request["max_file_bytes"], request["max_pixels"])
            if request["command"] == "open":
                reply = {"probe": held[1].to_json()}
            else:
                frames_FHWC, decoder = decode(source, held[1], request["indices"], request["decord"])
                reply = {"decoder": decoder, "shape": frames_FHWC.shape}
        except Rejected as rejected:
            reply = {"rejected": rejected.reason.value, "detail": rejected.detail}
        except Exception as error:  # a decoder's surprise is this file's fate, not the run's
            traceback.print_exc()
            reply = {"rejected": Reason.UNDECODABLE.value, "detail": f"{type(error).__name__}: {error}"}
        answers.write(pack(reply))
        if frames_FHWC is not None:
            answers.write(np.ascontiguousarray(frames_FHWC).data.cast("B"))
        answers.flush()


def source_to_json(source: Source) -> dict[str, Any]:
    """The part of a source that decoding needs."""
    return {"name": source.name, "path": source.path, "offset": source.offset, "size": source.size, "kind": source.kind}


def source_from_json(tree: dict[str, Any]) -> Source:
    """The source that `source_to_json` was made from, without captions."""
    return Source(**tree, captions=(), split="train")


def _receive(requests: BinaryIO, pending: queue.Queue[dict[str, Any]]) -> None:
    """Reads requests beside the decoder, so that a parent's death ends the process in the middle of a file too."""
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        text = requests.read(HEADER.unpack(header)[0])
        pending.put(json.loads(text))
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
