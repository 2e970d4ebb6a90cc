# shellcheck shell=bash
# Sourced with the names of requirements files: sets $python to a Python that has all they list. Tries $PYTHON or the
# current python3, then .venv beside the scripts, which is made and filled when needed. Says so when it installs.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

has_packages() { # PYTHON FILE...
  "$1" - "${@:2}" 2>/dev/null <<'PY'
import re, sys
from importlib.metadata import version
for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name:
            version(name.group())
PY
}

find_python() { # FILE...
  local wanted=("$@")
  python=${PYTHON:-python3}
  has_packages "$python" "${wanted[@]}" && return
  python="$root/.venv/bin/python"
  has_packages "$python" "${wanted[@]}" && return
  [ -x "$python" ] || { echo "making $root/.venv" >&2; "${PYTHON:-python3}" -m venv "$root/.venv"; }
  echo "installing ${wanted[*]#"$root/"} into $root/.venv (once, some minutes)" >&2
  "$python" -m pip install --quiet --disable-pip-version-check "${wanted[@]/#/--requirement=}" >&2
}

find_python "${@/#/$root/}"
