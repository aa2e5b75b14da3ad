"""Make HTML pages from the templates in `assets/pages`. Each page is one file, which fetches nothing and runs nothing."""

from __future__ import annotations

import base64
import functools
import io
from typing import TYPE_CHECKING, Any

from mmspeed.log import format_bytes, format_figure, format_seconds
from mmspeed.redaction import readable
from mmspeed.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure


def render(template: str, **content: Any) -> str:
    """The page of a template. Each value is escaped; control characters and marks that change the direction of writing are shown."""
    return _environment().get_template(template).render(content)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mmspeed", "assets/pages"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds, "figure": format_figure, "cut": _cut}
    environment.filters["commas"] = lambda count: f"{count:,}"
    environment.globals["version"] = __version__
    return environment


def _shown(value: Any) -> Any:
    """The readable text of a value; HTML that a template has made already is left as it is."""
    return value if hasattr(value, "__html__") else "\n".join(map(readable, str(value).split("\n")))


def _cut(text: str, length: int) -> str:
    """The text, or so much of its beginning that it has `length` characters with an ellipsis."""
    return text if len(text) <= length else text[: length - 3] + "..."


def data_uri(data: bytes, kind: str) -> str:
    """A data URI of a media type."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def figure_uri(figure: Figure) -> str:
    """A matplotlib figure as a data URI that holds a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return data_uri(buffer.getvalue(), "image/png")
