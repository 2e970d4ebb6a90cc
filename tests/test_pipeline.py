"""The shell scripts: the README's first command from text to text, what passes through them, and the environment.

Nothing is installed here: the scripts are given the Python that runs the tests, or one that only pretends.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, read_events, read_ids

FIRST_COMMAND = (
    "./prepare_data.sh --dataset=demo --tokenizer=train --vocab_size=2048 && ./start_train.sh config/train_demo.py "
    '&& ./generate_text.sh --out_dir=out/demo --start="The module "'
)
TINY_RUN = (
    "--n_layer=2 --n_head=2 --n_embd=32 --block_size=64 --max_iters=20 --warmup_iters=2 "
    "--eval_iters=2 --eval_interval=10 --checkpoint_interval=10 --device=cpu"
)
SMALL = {  # what makes the three commands quick
    "prepare_data.sh": ["--max_documents=200", "--num_proc=1"],
    "start_train.sh": TINY_RUN.split(),
    "generate_text.sh": ["--max_new_tokens=40", "--device=cpu"],
}
SCRIPTS = {"prepare_data.sh": "prepare.py", "start_train.sh": "train.py", "generate_text.sh": "sample.py"}
ODD_WORDS = [
    "--start=a  b",
    "--start='c' \"d\"",
    "",
    "--x=$HOME `id` \\n * ? !",
    "--ä=ü 😀 e\u0301",
    "-",
    "--y=1\n2",
    "&|;",
]
FAKE_PYTHON = """#!/usr/bin/env bash
# Pretends to be a Python without the packages; in a .venv that it made, one with them after `-m pip install`.
venv=$(dirname "$(dirname "$0")")
printf '%s\\n' "$*" | head -1 >>"$FAKE_LOG"
case "$1 ${2:-} ${3:-}" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/$([ -e "$FAKE_FAULT" ] || echo pip)" ;;
  "-m pip --version") [ -e "$venv/pip" ] ;;
  "-m pip install") [ -e "$venv/pip" ] && [ ! -e "$FAKE_FAULT" ] && touch "$venv/installed" ;;
  *version_info*) exit "${FAKE_OLD:-0}" ;;
  "-c  "*) ;;
  -c*) [ -e "$venv/installed" ] ;;
  *) printf '%s\\0' "$@" >&1 ;;
esac
"""


def run_script(script: Path | str, *words: str, cwd: Path, env: dict | None = None, stdin: str = ""):
    """Runs a shell script by its path, or one of the toolkit's by its name; returns the finished process."""
    return subprocess.run(
        [str(ROOT / script), *words],
        cwd=cwd,
        env={**os.environ, "PYTHON": sys.executable, **(env or {})},
        input=stdin,
        text=True,
        encoding="utf-8",
        capture_output=True,
        timeout=300,
    )


def first_command() -> str:
    """The first command of the README."""
    readme = ROOT / "README.md"
    if not readme.exists():
        return FIRST_COMMAND
    return re.search(r"^```bash\n(.*)\n", readme.read_text(encoding="utf-8"), re.MULTILINE)[1]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> tuple[Path, dict[str, subprocess.CompletedProcess]]:
    """A folder in which the README's first command ran, in small, and the three finished processes."""
    folder = tmp_path_factory.mktemp("pipeline")
    os.symlink(ROOT / "config", folder / "config")
    finished = {}
    for command in first_command().split(" && "):
        script, *words = shlex.split(command)
        name = script.removeprefix("./")
        finished[name] = run_script(name, *words, *SMALL[name], cwd=folder)
        assert finished[name].returncode == 0, finished[name].stderr
    return folder, finished


def copy_kit(folder: Path) -> Path:
    """The scripts alone, with programs that print their arguments as JSON and exit with $EXIT_CODE."""
    (folder / "tools").mkdir(parents=True)
    (folder / "tests").mkdir()
    for name in (*SCRIPTS, "tools/env.sh", "requirements.txt", "tests/run.sh", "tests/requirements.txt"):
        shutil.copy(ROOT / name, folder / name)
    for program in SCRIPTS.values():
        (folder / program).write_text(
            "import json, os, sys\n"
            "print(json.dumps([sys.argv[1:], os.getcwd(), sys.stdin.read()]))\n"
            "sys.exit(int(os.environ.get('EXIT_CODE', 0)))\n"
        )
    return folder


@pytest.fixture
def kit(tmp_path) -> Path:
    """The scripts in a folder whose name holds what shells stumble over."""
    return copy_kit(tmp_path / "R&D (my kit) ü")


@pytest.fixture
def fake(kit, tmp_path) -> dict[str, str]:
    """An environment in which python3 is a Python without packages that only pretends to install them."""
    stub = tmp_path / "stub" / "bin" / "python3"
    stub.parent.mkdir(parents=True)
    stub.write_text(FAKE_PYTHON)
    stub.chmod(0o755)
    (tmp_path / "log").touch()
    paths = {"FAKE_LOG": str(tmp_path / "log"), "FAKE_FAULT": str(tmp_path / "fault")}
    return paths | {"PATH": f"{stub.parent}:{os.environ['PATH']}", "PYTHON": "python3"}


def installs(fake: dict[str, str]) -> list[str]:
    """What the pretended Python was asked to make and install, oldest first."""
    log = Path(fake["FAKE_LOG"]).read_text(encoding="utf-8").splitlines()
    return [line for line in log if line.startswith(("-m venv", "-m pip install"))]


# --- the pipeline ---------------------------------------------------------------------------------------------------


def test_first_command_is_the_one_tested() -> None:
    assert first_command() == FIRST_COMMAND


def test_data_folder(pipeline) -> None:
    folder, finished = pipeline
    data = folder / "data" / "demo"
    assert {p.name for p in data.iterdir()} == {"train.bin", "val.bin", "meta.json", "tokenizer.json"}
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    assert meta["vocab_size"] == 2048
    assert meta["splits"]["train"]["documents"] + meta["splits"]["val"]["documents"] == 200
    assert read_ids(data, "val").count(meta["eot_id"]) == meta["splits"]["val"]["documents"] == 20
    assert "next: ./start_train.sh --dataset=demo\n" in finished["prepare_data.sh"].stdout
    assert finished["prepare_data.sh"].stderr == ""


def test_run_folder(pipeline) -> None:
    folder, finished = pipeline
    run = folder / "out" / "demo"
    written = {p.name for p in run.iterdir() if not p.name.startswith(".")}
    states = {"my_own_llm.pt", "last.pt", "previous.pt"}
    assert written == states | {"config.json", "metrics.jsonl", "loss.png", "samples.txt"}
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert (settings["dataset"], settings["learning_rate"], settings["max_iters"]) == ("demo", 3e-3, 20)
    losses = [event["val_loss"] for event in read_events(run, "eval")]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.5 and abs(losses[0] - math.log(2048)) < 0.3
    assert read_events(run, "end")[0]["reason"] == "finished"
    assert "next: ./generate_text.sh --out_dir=out/demo\n" in finished["start_train.sh"].stdout


def test_generated_text(pipeline) -> None:
    folder, finished = pipeline
    text = finished["generate_text.sh"].stdout
    assert text.startswith("The module ") and len(text) > len("The module ") + 40
    assert "step 20" in finished["generate_text.sh"].stderr
    shutil.move(folder / "data", folder / "elsewhere")  # the checkpoint alone is enough
    try:
        again = run_script(
            "generate_text.sh", "--out_dir=out/demo", "--start=The module ", *SMALL["generate_text.sh"], cwd=folder
        )
    finally:
        shutil.move(folder / "elsewhere", folder / "data")
    assert again.stdout == text


def test_second_call_changes_nothing_unasked(pipeline) -> None:
    folder, _ = pipeline
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    words = shlex.split(first_command().split(" && ")[0])[1:]
    kept = run_script("prepare_data.sh", *words, *SMALL["prepare_data.sh"], cwd=folder)
    assert kept.returncode == 0 and "already prepared" in kept.stdout
    refused = run_script("start_train.sh", "config/train_demo.py", *SMALL["start_train.sh"], cwd=folder)
    assert refused.returncode == 2 and "--overwrite=true" in refused.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


# --- what passes through the scripts --------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_pass_unchanged(kit, tmp_path, script) -> None:
    finished = run_script(kit / script, *ODD_WORDS, cwd=tmp_path, stdin="a prompt\n")
    words, folder, stdin = json.loads(finished.stdout)
    assert words == ODD_WORDS and folder == str(tmp_path) and stdin == "a prompt\n"
    assert finished.stderr == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_words_at_all(kit, tmp_path, script) -> None:
    assert json.loads(run_script(kit / script, cwd=tmp_path).stdout)[0] == []


@pytest.mark.parametrize("code", [2, 130])
def test_exit_codes_pass(kit, tmp_path, code) -> None:
    assert run_script(kit / "start_train.sh", cwd=tmp_path, env={"EXIT_CODE": str(code)}).returncode == code


def test_called_by_link_and_by_relative_path(kit, tmp_path) -> None:
    (tmp_path / "bin").mkdir()
    os.symlink(kit / "generate_text.sh", tmp_path / "bin" / "generate")
    os.symlink("generate", tmp_path / "bin" / "again")
    os.symlink(kit, tmp_path / "kit")
    for called in ("bin/generate", "bin/again", "kit/generate_text.sh"):
        finished = run_script(tmp_path / called, "x", cwd=tmp_path / "bin")
        assert json.loads(finished.stdout)[:2] == [["x"], str(tmp_path / "bin")], finished.stderr
    other = tmp_path / "other" / kit.name  # CDPATH would lead there
    other.mkdir(parents=True)
    command = ["bash", f"{kit.name}/generate_text.sh", "x"]
    environment = {**os.environ, "PYTHON": sys.executable, "CDPATH": str(other.parent)}
    text = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, input="").stdout
    assert json.loads(text)[0] == ["x"]


def test_gpus_start_as_many_processes(kit, tmp_path, fake) -> None:
    (Path(fake["PATH"].split(":")[0]).parent / "installed").touch()
    several = run_script(kit / "start_train.sh", "a b", cwd=tmp_path, env=fake | {"GPUS": "3"})
    expected = [f"{kit}/tools/launch.py", "--standalone", "--nproc_per_node=3", f"{kit}/train.py", "a b", ""]
    assert several.stdout.split("\0") == expected
    one = run_script(kit / "start_train.sh", cwd=tmp_path, env=fake | {"GPUS": "1"})
    assert one.stdout.split("\0") == [f"{kit}/train.py", ""]


@pytest.mark.parametrize("gpus", ["two", "0", "-1", "1.5"])
def test_gpus_that_are_no_number(kit, tmp_path, gpus) -> None:
    finished = run_script(kit / "start_train.sh", cwd=tmp_path, env={"GPUS": gpus})
    assert finished.returncode == 2 and finished.stdout == ""
    assert finished.stderr.startswith(f"error: GPUS={gpus} ") and finished.stderr.count("\n") == 1


# --- the environment ------------------------------------------------------------------------------------------------


def test_missing_packages_are_installed_once(kit, tmp_path, fake) -> None:
    first = run_script(kit / "prepare_data.sh", "a b", cwd=tmp_path, env=fake)
    assert first.stdout.split("\0") == [f"{kit}/prepare.py", "a b", ""]
    assert first.stderr.splitlines() == [
        f"making {kit}/.venv",
        f"installing requirements.txt into {kit}/.venv (once, some minutes)",
    ]
    pip = f"-m pip install --quiet --disable-pip-version-check --requirement={kit}/requirements.txt"
    assert installs(fake) == [f"-m venv {kit}/.venv", pip]
    assert not (kit / ".venv" / "busy").is_symlink()
    second = run_script(kit / "generate_text.sh", cwd=tmp_path, env=fake)
    assert second.stderr == "" and second.stdout.split("\0")[0] == f"{kit}/sample.py"
    assert len(installs(fake)) == 2


def test_tests_install_their_own_packages_too(kit, tmp_path, fake) -> None:
    finished = run_script(kit / "tests" / "run.sh", "-k", "a or b", cwd=tmp_path, env=fake)
    assert finished.stdout.split("\0") == ["-m", "pytest", "-k", "a or b", ""]
    assert installs(fake)[-1].endswith(
        f"--requirement={kit}/requirements.txt --requirement={kit}/tests/requirements.txt"
    )


def test_cut_off_install_is_taken_up(kit, tmp_path, fake) -> None:
    Path(fake["FAKE_FAULT"]).touch()  # leaves a .venv without pip, and no packages
    cut = run_script(kit / "prepare_data.sh", cwd=tmp_path, env=fake)
    assert cut.returncode == 2 and cut.stdout == ""
    assert cut.stderr.splitlines()[-1].startswith(f"error: pip could not fill {kit}/.venv")
    Path(fake["FAKE_FAULT"]).unlink()
    assert run_script(kit / "prepare_data.sh", cwd=tmp_path, env=fake).stdout.split("\0")[0] == f"{kit}/prepare.py"
    (kit / ".venv" / "installed").unlink()  # pip was stopped
    again = run_script(kit / "prepare_data.sh", cwd=tmp_path, env=fake)
    assert again.stdout.split("\0")[0] == f"{kit}/prepare.py" and "making" not in again.stderr


def test_two_calls_do_not_install_at_once(kit, tmp_path, fake) -> None:
    (kit / ".venv").mkdir()
    os.symlink(str(os.getpid()), kit / ".venv" / "busy")  # of a call that is still at work
    finished = run_script(kit / "prepare_data.sh", cwd=tmp_path, env=fake)
    assert finished.returncode == 2 and installs(fake) == []
    assert finished.stderr == f"error: another call is filling {kit}/.venv: wait for it\n"


def test_package_without_its_record_is_not_there(kit, tmp_path, fake) -> None:
    run_script(kit / "prepare_data.sh", cwd=tmp_path, env=fake)
    (kit / ".venv" / "installed").unlink()
    packages = kit / ".venv" / "lib" / "python3.11" / "site-packages"
    for name in ("whole-1.0", "half-1.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
        (packages / f"{name}.dist-info" / "METADATA").write_text("Name: x\nVersion: 1.0\n")
    (packages / "whole-1.0.dist-info" / "RECORD").write_text("a file\n")
    run_script(kit / "prepare_data.sh", cwd=tmp_path, env=fake)
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]  # pip stumbles over the other
    (packages / "half-1.0.dist-info").mkdir()
    (kit / "prepare.py").write_text("import sys; print(sys.executable)")
    for name in ("whole", "half"):
        (kit / "requirements.txt").write_text(f"{name}\n")
        environment = fake | {"PYTHON": sys.executable, "PYTHONPATH": str(packages)}
        finished = run_script(kit / "prepare_data.sh", cwd=tmp_path, env=environment)
        assert (finished.stdout == f"{sys.executable}\n") == (name == "whole")


def test_environment_whose_python_is_gone(kit, tmp_path, fake) -> None:
    (kit / ".venv" / "bin").mkdir(parents=True)
    os.symlink("/no/such/python3.9", kit / ".venv" / "bin" / "python")
    finished = run_script(kit / "prepare_data.sh", cwd=tmp_path, env=fake)
    assert finished.stdout.split("\0")[0] == f"{kit}/prepare.py", finished.stderr


@pytest.mark.parametrize("fault", [{"FAKE_OLD": "1"}, {"PYTHON": "/no/such/python"}])
def test_python_too_old_or_absent(kit, tmp_path, fake, fault) -> None:
    finished = run_script(kit / "prepare_data.sh", cwd=tmp_path, env=fake | fault)
    assert finished.returncode == 2 and installs(fake) == [] and not (kit / ".venv").exists()
    assert "is not Python 3.10 or newer" in finished.stderr and finished.stderr.count("\n") == 1


def test_packages_are_looked_for(kit, tmp_path, fake) -> None:
    run_script(kit / "prepare_data.sh", cwd=tmp_path, env=fake)  # makes a .venv with all packages
    (kit / "requirements.txt").write_text("# a comment\n\nnumpy==1.0  # any version\nPyYAML\n")
    assert json.loads(run_script(kit / "prepare_data.sh", cwd=tmp_path).stdout)[0] == []
    (kit / "requirements.txt").write_text("numpy\nno-such-package-anywhere\n")
    finished = run_script(kit / "prepare_data.sh", cwd=tmp_path, env=fake | {"PYTHON": sys.executable})
    assert finished.stdout.split("\0")[0] == f"{kit}/prepare.py" and len(installs(fake)) == 2


def test_looking_is_quick_and_undisturbed(kit, tmp_path) -> None:
    (tmp_path / "re.py").write_text("raise SystemExit('a module of the user')")
    (kit / "prepare.py").write_text("print('[]')")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = run_script(kit / "prepare_data.sh", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert finished.stdout == "[]\n" and finished.stderr == ""
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.4  # seconds of CPU; 0.15 usually
