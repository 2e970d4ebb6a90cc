#!/usr/bin/env bash
# Runs the tests:  tests/run.sh [pytest arguments]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$here/tools/env.sh" requirements.txt tests/requirements.txt
cd "$here"
exec "$python" -m pytest "$@"
