#!/usr/bin/env bash
# tokens → checkpoint. Settings pass through to train.py:  [GPUS=4] ./start_train.sh [config.py] [--key=value ...]
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tools/env.sh" requirements.txt
case ${GPUS:-1} in
  1) exec "$python" "$root/train.py" "$@" ;;
  0 | *[!0-9]*) echo "error: GPUS=$GPUS is not a number of GPUs: GPUS=2 $0 ..." >&2 && exit 2 ;;
  *) exec "$python" "$root/tools/launch.py" --standalone --nproc_per_node="$GPUS" "$root/train.py" "$@" ;;
esac
