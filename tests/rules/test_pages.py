"""The pages show what there is: commands parse, configs load, Python compiles and finds its imports, links lead somewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.support import pages
from tests.support.pages import PAGES, CodeBlock, blocks

REFUSED = "\nmmspeed: error: "  # shown on purpose: tests/unit/test_pages_run.py compares the message
BLOCKS = [block for page in PAGES for block in blocks(page)]


def faults(cases: Iterable[tuple[str, Callable[[], Any]]]) -> list[str]:
    """The cases whose check raises, with what it says."""
    lines = []
    for name, check in cases:
        try:
            check()
        except (Exception, SystemExit) as error:
            lines.append(f"{name}: {type(error).__name__}: {getattr(error, 'message', error)}")
    return lines


def of_language(*languages: str) -> list[CodeBlock]:
    """The blocks in these languages; there are some."""
    chosen = [block for block in BLOCKS if block.language in languages]
    assert chosen
    return chosen


def test_every_command_is_one_that_its_program_takes() -> None:
    lines = [(block, line) for block in BLOCKS for line in pages.command_lines(block)]
    assert lines
    wrong = faults(
        (f"{block}: {line}", lambda line=line: pages.check_command(pages.words_of(line)))  # type: ignore[misc]
        for block, line in lines
        if pages.program_of(line) in pages.PROGRAMS and REFUSED not in block.text
    )
    assert not wrong, "\n".join(wrong)


def test_blocks_of_commands_hold_nothing_else() -> None:
    for block in of_language("bash"):
        lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip() and line[0] != "#"]
        assert len(pages.command_lines(block)) == len(lines), block


def test_commands_named_in_sentences_are_there() -> None:
    mentions = {
        (page.name, mention) for page in PAGES for mention in pages.INLINE.findall(page.read_text(encoding="utf-8"))
    }
    assert mentions
    wrong = faults((f"{page}: {text}", lambda text=text: pages.check_mention(text)) for page, text in sorted(mentions))  # type: ignore[misc]
    assert not wrong, "\n".join(wrong)


def test_every_config_is_accepted() -> None:
    wrong = faults(
        (str(block), lambda block=block: pages.config_of(block.text))  # type: ignore[misc]
        for block in of_language("yaml")
        if not block.text.startswith("# refused")
    )
    assert not wrong, "\n".join(wrong)


def test_python_compiles_and_finds_what_it_imports() -> None:
    wrong = faults(
        (str(block), lambda block=block: pages.check_python(block, pages.modules_of(block.page)))  # type: ignore[misc]
        for block in of_language("python")
    )
    assert not wrong, "\n".join(wrong)


def test_blocks_name_a_language_that_is_checked() -> None:
    known = {"", "bash", "console", "python", "yaml", "toml", "text"}
    assert not [str(block) for block in BLOCKS if block.language not in known]
    hidden = [str(block) for block in BLOCKS if block.language == "" and block.text.startswith(("from ", "import "))]
    assert not hidden, f"Python that no fence names: {hidden}"


def test_links_lead_to_files_and_headings() -> None:
    broken = [f"{page.name}: {target}" for page in PAGES for target in pages.broken_links(page)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (pages.check_command, ["mmspeed", "train", "my-run.yaml", "--procs", "8"]),
        (pages.check_command, ["make", "everything"]),
        (pages.check_command, ["pip", "install", ".[gpu]"]),
        (pages.check_mention, "mmspeed bench speed"),
        (pages.config_of, "train: {rate: 1}"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_page_that_is_wrong_is_noticed(check: Callable[[Any], Any], value: Any) -> None:
    assert faults([("wrong", lambda: check(value))])
