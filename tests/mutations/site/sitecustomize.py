"""Records which functions of the product a process calls: Python imports this file at its start where its folder is on PYTHONPATH.

Every process of a test, those of ranks and of commands too, appends "<file>\t<first line>" to one file, when a function is first called.
A forked process begins without memory of what its parent called.
"""

import contextlib
import os
import sys
import threading

seen: dict[int, object] = {}  # by identity; the code objects are held, so that no identity comes twice


def _record(target, root):  # type: ignore[no-untyped-def]
    open(target, "ab").close()

    def look(frame, event, _):  # type: ignore[no-untyped-def]
        if event == "call":
            code = frame.f_code
            if id(code) not in seen:
                seen[id(code)] = code
                if code.co_filename.startswith(root):
                    # opened each time, since some tests close all files; others limit their size
                    with contextlib.suppress(OSError), open(target, "ab", buffering=0) as log:
                        log.write(f"{code.co_filename[len(root) :]}\t{code.co_firstlineno}\n".encode())

    def begin() -> None:
        """Look at calls from here on: tests that profile something leave the interpreter without a profile function."""
        threading.setprofile(look)
        sys.setprofile(look)

    os.register_at_fork(after_in_child=seen.clear)
    begin()
    return begin


if "MMSPEED_REACHED" in os.environ:
    begin = _record(os.environ["MMSPEED_REACHED"], os.environ["MMSPEED_REACHED_ROOT"] + os.sep)
