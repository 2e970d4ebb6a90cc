#!/usr/bin/env bash
# checkpoint → text. Settings pass through to sample.py:  ./generate_text.sh [--key=value ...]   (--help lists them)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/tools/env.sh" requirements.txt
exec "$python" "$here/sample.py" "$@"
