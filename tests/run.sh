#!/usr/bin/env bash
# Runs the tests:  tests/run.sh [pytest arguments]
set -euo pipefail
# shellcheck source=tools/env.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../tools/env.sh" requirements.txt tests/requirements.txt
cd "$root"
exec "$python" -m pytest "$@"
