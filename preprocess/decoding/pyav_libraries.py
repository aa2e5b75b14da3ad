"""The FFmpeg libraries that PyAV's wheel brings, made known to torchcodec, which brings none and looks for the system's."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

_BUNDLED = re.compile(r"(lib(?:av|sw)\w+)-[0-9a-f]+(\.so\.\d+)[.\d]*")  # such as libavutil-5809ad29.so.60.26.102
_SEARCHED = "LD_LIBRARY_PATH"


def with_pyav_libraries(folder: Path) -> dict[str, str]:
    """This process's environment, in which a child finds PyAV's FFmpeg libraries first, by links in `folder` with their usual names.

    So both decoders have one FFmpeg. Unchanged where PyAV brings none, as a PyAV built from source does not.
    """
    environment = dict(os.environ)
    spec = importlib.util.find_spec("av")
    if spec is None or spec.origin is None:
        return environment
    bundle = Path(spec.origin).parent.parent / "av.libs"
    names = {path: match for path in bundle.glob("lib*") if (match := _BUNDLED.fullmatch(path.name))}
    if not names:
        return environment
    for path, match in names.items():
        (folder / f"{match[1]}{match[2]}").symlink_to(path)
    before = environment.get(_SEARCHED)
    environment[_SEARCHED] = os.pathsep.join([str(folder), str(bundle), *([before] if before else [])])
    return environment
