"""Prints what grows: `make lint` shows it, and nothing fails by it."""

from __future__ import annotations

import ast

from tests.rules.sources import CODE, ROOT, name, nodes, python_files, syntax


def main() -> None:
    """Print the words of README and pages, the largest file, the longest function, and the lines of product and tests."""
    pages = {
        page: len(page.read_text(encoding="utf-8").split()) for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    }
    product, tests = (
        {path: len(path.read_bytes().splitlines()) for path in python_files(*f)} for f in (CODE, ("tests",))
    )
    lines = product | tests
    functions = {
        f"{name(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in lines
        for node in nodes(syntax(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    file, function = max(lines, key=lines.__getitem__), max(functions, key=functions.__getitem__)
    print(f"README: {pages[ROOT / 'README.md']} words; all pages: {sum(pages.values()):,}")
    print(f"largest file: {name(file)}, {lines[file]} lines; longest function: {function}, {functions[function]} lines")
    share = sum(tests.values()) / sum(product.values())
    print(f"product: {sum(product.values()):,} lines; tests: {sum(tests.values()):,}, {share:.2f} of that")


if __name__ == "__main__":
    main()
