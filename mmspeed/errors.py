"""The one exception that people are meant to read."""


class UserError(Exception):
    """An error that the user can fix: one or two lines that say what is wrong, where, and what to do.

    The command line prints it without a traceback (`--debug` shows one) and exits with 1.
    """


def nearest(word: str, choices: "list[str] | tuple[str, ...]") -> str:
    """`; did you mean 'x'?` with the nearest of `choices`, or an empty string when none is near."""
    import difflib

    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else ""
