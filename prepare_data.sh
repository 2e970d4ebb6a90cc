#!/usr/bin/env bash
# corpus → tokens. Settings pass through to prepare.py:  ./prepare_data.sh [--key=value ...]   (--help lists them)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/tools/env.sh" requirements.txt
exec "$python" "$here/prepare.py" "$@"
