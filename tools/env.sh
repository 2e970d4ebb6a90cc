# shellcheck shell=bash
# Sourced with the names of requirements files: sets $root to the folder of the scripts, and $python to a Python that has
# all that the files list. Tries $PYTHON or the current python3, then .venv in that folder, which is made and filled when
# needed; says so when it installs. An install that was cut off is taken up by the next call.
root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")

has_packages() { # PYTHON FILE...
  "$1" -c '
import sys
sys.path[:] = [folder for folder in sys.path if folder]  # not the current one, where a re.py may lie
import re
from importlib.metadata import version
for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        if name := re.match(r"[A-Za-z0-9._-]+", line):
            version(name.group())
' "${@:2}" 2>/dev/null
}

find_python() { # FILE...
  local base=${PYTHON:-python3} venv=$root/.venv file files=() options=()
  for file in "$@"; do files+=("$root/$file") options+=("--requirement=$root/$file"); done
  python=$base
  has_packages "$python" "${files[@]}" && return
  python=$venv/bin/python
  has_packages "$python" "${files[@]}" && return
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    { echo "error: $base is not Python 3.10 or newer: name one, PYTHON=/path/to/python3 $0" >&2; exit 2; }
  if ! "$python" -m pip --version >/dev/null 2>&1; then # none there, or one that was cut off, or its Python is gone
    echo "making $venv" >&2
    "$python" -c '' 2>/dev/null || rm -rf "$venv"
    "$base" -m venv "$venv"
  fi
  echo "installing $* into $venv (once, some minutes)" >&2
  "$python" -m pip install --quiet --disable-pip-version-check "${options[@]}" >&2 ||
    { echo "error: pip could not fill $venv, see above; the next call tries again" >&2; exit 2; }
}

find_python "$@"
