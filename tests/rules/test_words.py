"""One word for one thing, in what users read: sources are what is listed, data sets are entries of `data.sources`, tokens say whose."""

from __future__ import annotations

import ast
import re

from .sources import CODE, ROOT, nodes, python_files, syntax

WRONG = {
    r"\bmedia (is|are) usable": "sources are usable",
    r"\bmedia (have|has) no caption|\bmedia without a caption": "sources without a caption",
    r"\busable (media|clips|videos)\b": "usable sources",
    r"\btokens of (the )?latents\b": "tokens of the latent, or of the model",
    r"\b(latent|model) tokens\b": "tokens of the latent, or of the model",
    r"\bsource \{one\.name\}": "data set: a source is one of its files",
}


def texts() -> dict[str, str]:
    """What users read, by file: the strings of the code, and the pages."""
    results = {}
    for path in python_files(*CODE):
        tree = syntax(path)
        texts = [ast.unparse(n) if isinstance(n, ast.JoinedStr) else n.value for n in nodes(tree) if _is_text(n)]  # type: ignore[attr-defined]
        results[str(path.relative_to(ROOT))] = "\n".join(map(str, texts))
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    return results | {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in pages}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_things_have_one_word() -> None:
    wrong = [
        f"{name}: {match[0]!r}: say {right}"
        for name, text in texts().items()
        for pattern, right in WRONG.items()
        for match in re.finditer(pattern, text)
    ]
    assert not wrong, "\n".join(wrong)
