"""Lists of names in messages."""

from __future__ import annotations

from mmspeed.errors import first_names


def test_the_first_names_and_the_number_of_the_others() -> None:
    assert first_names([]) == "" and first_names(["a", "b"]) == "a, b"
    assert first_names(list("abcd"), 3) == "a, b, c and 1 more"
    assert first_names(["a", "b"], 3, count=40) == "a, b and 38 more"
