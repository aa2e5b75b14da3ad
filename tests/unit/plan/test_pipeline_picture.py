"""The drawing of a step: a bar for each pass, where and as long as its time."""

from __future__ import annotations

from xml.etree import ElementTree

from mmspeed.plan.pipeline_picture import LEFT, ROW, WIDTH, pipeline_svg
from mmspeed.plan.schedules import Action, Pair, Pipeline
from mmspeed.plan.simulate import reckoned

SVG = "{http://www.w3.org/2000/svg}"


def bars(text: str) -> list[tuple[str, float, float, float, str]]:
    """(words, x, width, height, label) of each bar."""
    found = []
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        title, bar, *label = group
        x, width, height = (float(bar.get(name, "")) for name in ("x", "width", "height"))
        found.append((title.text or "", x, width, height, label[0].text or "" if label else ""))
    return found


def test_each_pass_has_a_bar_of_its_time() -> None:
    step = reckoned(Pipeline(2, 2), 4)
    found = iter(bars(pipeline_svg(step.spans, lambda time: f"{time:g}")))
    for entry, begin, end in (span for row in step.spans for span in row):
        (part,) = entry.parts
        words, x, width, height, label = next(found)
        assert words == f"{part.kind}, micro-batch {part.batch}, stage {part.stage}: {begin:g} to {end:g}"
        assert (
            abs(x - LEFT - begin / step.step * WIDTH) < 0.01 and abs(width - (end - begin) / step.step * WIDTH) < 0.01
        )
        assert (height, label) == (ROW, str(part.batch))
    assert next(found, None) is None


def test_passes_that_overlap_share_a_bars_height_and_narrow_ones_have_no_label() -> None:
    pair = Pair(Action("forward", 0, 3), Action("backward", 1, 21))
    (above, below, narrow) = bars(pipeline_svg([[(pair, 0.0, 1.0)], [(Action("weight", 0, 12), 0.0, 1e-4)]]))
    assert (above[3], below[3], above[4], below[4]) == (ROW / 2, ROW / 2, "3", "21")
    assert narrow[4] == "" and narrow[0].endswith("0 ms to 100 us")


def test_a_step_without_passes_is_drawn() -> None:
    assert bars(pipeline_svg([[], []])) == []
