"""The decoder process: reads requests from standard input, answers on standard output, and ends with its parent.

A message is a length (8 bytes, big-endian), that many bytes of JSON, and then the raw bytes of the `shape` that it states,
if any. `python -m mmspeed.preprocess.decoding.decode_worker [OTHER]` starts it, OTHER being the JSON of an `OtherDecoder` that it
imports; without torchcodec it imports no torch, to start in a moment. Its first message is {"ready"}, or {"unusable": why}.

    request                                       answers
    {"command": "open", "source", limits}         {"probe"}
    {"command": "read", "source", "cuts", limits} for each cut, as it is complete: {"position", "shape"} and its planes
                                                  (F, 3, H, W), or {"position", "rejected", "detail"}; then {"end"}
    {"command": "scenes", "source", "detector"}   after each batch of frames: {"position": its number, "cuts": those found}; then {"end"}
    "other" in all: the JSON of an `OtherDecoder`, or null
    any                                           {"rejected", "detail"}: the whole request failed; "together" when
                                                  one of its cuts may be why, so that each is to be tried alone

Legend: F frames, H W height and width in pixels.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import struct
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

import av.logging
import numpy as np

from mmspeed.guards import end_with_parent
from mmspeed.media.decode import Cut, stream
from mmspeed.media.other_decoders import OtherDecoder, examine, why_unusable
from mmspeed.media.pixel_rules import PixelRules
from mmspeed.media.probe import Probe, allow_large_pictures, probe
from mmspeed.media.rejections import Reason, Rejected, in_words
from mmspeed.media.source import Source
from mmspeed.preprocess.decoding.scenes import SceneDetector, find_cuts

HEADER = struct.Struct(">Q")
# of data that a decoder process may allocate: a window of 8k frames fits, a decompression bomb does not
MEMORY_BYTES = 16 << 30
Answer = tuple[dict[str, Any], "np.ndarray | None"]


def pack(message: dict[str, Any]) -> bytes:
    """The header and JSON of a message, without raw bytes."""
    text = json.dumps(message).encode()
    return HEADER.pack(len(text)) + text


def _limit_memory() -> None:
    """Limit this process's memory, so that a file that needs too much fails alone and does not affect other processes."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def main() -> None:
    """Serve requests until standard input ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the messages
    end_with_parent()
    _limit_memory()
    allow_large_pictures()
    av.logging.set_level(av.logging.PANIC)
    pending: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_receive, args=(requests, pending), daemon=True).start()
    unusable = why_unusable(OtherDecoder.from_json(json.loads(sys.argv[1]))) if sys.argv[1:] else ""
    _send(answers, {"unusable": unusable} if unusable else {"ready": os.getpid()}, None)
    server = _Server()
    while True:
        request = pending.get()
        try:
            for message, planes in server.answers(request):
                _send(answers, message, planes)
        except Rejected as rejected:
            _send(answers, _rejection(rejected), None)
        except BrokenPipeError:
            raise
        except Exception as error:  # an unexpected error fails this file, not the run
            traceback.print_exc()
            surprise = Rejected(Reason.UNDECODABLE, in_words(error))
            _send(answers, _rejection(surprise) | {"together": True}, None)


class _Server:
    """Answers requests; keeps the last file's probe."""

    def __init__(self) -> None:
        self._held: tuple[Source, Probe] | None = None

    def answers(self, request: dict[str, Any]) -> Iterator[Answer]:
        source = source_from_json(request["source"])
        other = OtherDecoder.from_json(request["other"]) if request["other"] else None
        if self._held is None or self._held[0] != source or request["command"] == "open":
            self._held = None
            probed = probe(source, request["max_file_bytes"], request["max_pixels"])
            probed.require_read()
            self._held = source, probed if other is None else examine(source, probed, other)
        if request["command"] == "open":
            yield {"probe": self._held[1].to_json()}, None
            return
        if request["command"] == "scenes":
            cuts_of_batches = find_cuts(source, self._held[1], SceneDetector(**request["detector"]))
            for position, new_cuts in enumerate(cuts_of_batches):
                yield {"position": position, "cuts": new_cuts}, None
            yield {"end": True}, None
            return
        cuts = [cut_from_json(tree) for tree in request["cuts"]]
        for position, result in stream(source, self._held[1], cuts, other):
            if isinstance(result, Rejected):
                yield {"position": position} | _rejection(result), None
            else:
                planes_FCHW = result.transpose(0, 3, 1, 2)
                yield {"position": position, "shape": planes_FCHW.shape}, planes_FCHW
        yield {"end": True}, None


def source_to_json(source: Source) -> dict[str, Any]:
    """The part of a source that decoding needs; a remote one is read from its local copy."""
    if source.copy:
        return {"name": source.name, "path": source.copy, "offset": None, "size": None, "kind": source.kind}
    return {"name": source.name, "path": source.path, "offset": source.offset, "size": source.size, "kind": source.kind}


def source_from_json(tree: dict[str, Any]) -> Source:
    """The inverse of `source_to_json`; the source has no captions."""
    return Source(**tree, captions=(), split="train")


def cut_to_json(cut: Cut) -> dict[str, Any]:
    """A cut in JSON's types."""
    return asdict(cut)


def cut_from_json(tree: dict[str, Any]) -> Cut:
    """The inverse of `cut_to_json`."""
    left, top, right, bottom = tree["crop"]
    rules = PixelRules(**tree["rules"])
    crop = left, top, right, bottom
    return Cut(tuple(tree["indices"]), crop, tree["width"], tree["height"], rules, tree["mirrored"])


def _rejection(rejected: Rejected) -> dict[str, Any]:
    return {"rejected": rejected.reason.value, "detail": rejected.detail}


def _send(answers: BinaryIO, message: dict[str, Any], planes: np.ndarray | None) -> None:
    """Send an answer; blocks until the parent reads it, so at most one finished clip waits here."""
    answers.write(pack(message))
    if planes is not None:
        answers.write(np.ascontiguousarray(planes).data.cast("B"))
    answers.flush()


def _receive(requests: BinaryIO, pending: queue.Queue[dict[str, Any]]) -> None:
    """Read requests in a thread, so that the parent's death ends the process even in the middle of a file."""
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        text = requests.read(HEADER.unpack(header)[0])
        pending.put(json.loads(text))
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
