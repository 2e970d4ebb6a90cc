"""Questions and answers on the Python documentation, made of the docstrings of the standard library.

    python -m tests.make_questions > questions.jsonl

One JSON object a line, {"question", "answer"}; the same Python gives the same lines. Something to try fine-tuning with.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from corpus import stdlib_modules

LONGEST = 300  # characters of an answer


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring, on one line; empty where there is no plain one."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)[0]
    return sentence if 10 < len(sentence) <= LONGEST and not re.search(r"->|\.\. |>>>|\w+\(.*\) --?", sentence) else ""


def questions(name: str, source: bytes) -> Iterator[tuple[str, str]]:
    """Questions and answers on one module and its public classes and functions."""
    tree = ast.parse(source)
    if about := first_sentence(ast.get_docstring(tree) or ""):
        yield f"What is the module {name} for?", about
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        if about := first_sentence(ast.get_docstring(node) or ""):
            yield (
                f"What {'is' if kind == 'class' else 'does'} {name}.{node.name}{'' if kind == 'class' else ' do'}?",
                about,
            )
            yield f"Which module has the {kind} {node.name}?", f"The {kind} {node.name} is in the module {name}."
        if kind == "function" and len(taken := ast.unparse(node.args)) < 100:
            answer = f"It takes {taken}." if taken else "It takes no arguments."
            yield f"What arguments does {name}.{node.name} take?", answer


def main() -> None:
    """Writes all of them to standard output."""
    for name, path in stdlib_modules():
        try:
            for question, answer in questions(name, Path(path).read_bytes()):
                print(json.dumps({"question": question, "answer": answer}))
        except (SyntaxError, ValueError) as error:
            print(f"{name} left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
