#!/usr/bin/env bash
# checkpoint → text. Settings pass through to sample.py:  ./generate_text.sh [--key=value ...]   (--help lists them)
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools/env.sh" requirements.txt
exec "$python" "$root/sample.py" "$@"
