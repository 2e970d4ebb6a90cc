#!/usr/bin/env bash
# corpus → tokens. Settings pass through to prepare.py:  ./prepare_data.sh [--key=value ...]   (--help lists them)
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools/env.sh" requirements.txt
exec "$python" "$root/prepare.py" "$@"
