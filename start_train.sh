#!/usr/bin/env bash
# tokens → checkpoint. Settings pass through to train.py:  [GPUS=4] ./start_train.sh [config.py] [--key=value ...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/tools/env.sh" requirements.txt
if [ "${GPUS:-1}" -gt 1 ]; then
  exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$GPUS" "$here/train.py" "$@"
fi
exec "$python" "$here/train.py" "$@"
