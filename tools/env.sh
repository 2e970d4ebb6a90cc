# shellcheck shell=bash
# Sourced with the names of requirements files: sets $root to the folder of the scripts, and $python to a Python that has
# all that the files list. Tries $PYTHON or the current python3, then .venv in that folder, which is made and filled when
# needed; says so when it installs. An install that was cut off is taken up by the next call.
root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")

fail() { echo "error: $1" >&2 && exit 2; }

has_packages() { # PYTHON FILE...
  "$1" -c '
import sys
sys.path[:] = [folder for folder in sys.path if folder]  # not the current one, where a re.py may lie
import re
from importlib.metadata import distribution
for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        name = re.match(r"[A-Za-z0-9._-]+", line)
        assert not name or distribution(name.group()).read_text("RECORD")  # which pip writes last
' "${@:2}" 2>/dev/null
}

find_python() { # FILE...
  local base=${PYTHON:-python3} venv=$root/.venv file files=() options=()
  for file in "$@"; do files+=("$root/$file") options+=("--requirement=$root/$file"); done
  for python in "$base" "$venv/bin/python"; do has_packages "$python" "${files[@]}" && return; done
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "$base is not Python 3.10 or newer: name one, PYTHON=/path/to/python3 $0"
  if kill -0 "$(readlink "$venv/busy")" 2>/dev/null; then fail "another call is filling $venv: wait for it"; fi
  "$python" -c '' 2>/dev/null || rm -rf "$venv" # its Python is gone
  mkdir -p "$venv" && ln -sfn $$ "$venv/busy"
  for file in "$venv"/lib/python*/site-packages/*.dist-info; do [ -s "$file/RECORD" ] || rm -rf "$file"; done # cut off
  "$python" -m pip --version >/dev/null 2>&1 || { echo "making $venv" >&2 && "$base" -m venv "$venv"; }
  echo "installing $* into $venv (once, some minutes)" >&2
  "$python" -m pip install --quiet --disable-pip-version-check "${options[@]}" >&2 ||
    fail "pip could not fill $venv, see above; the next call tries again"
  rm "$venv/busy"
}

find_python "$@"
