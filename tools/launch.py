"""Starts a training on several GPUs through torchrun, and ends as the training does.

In:  torchrun's own arguments, then train.py and its settings.
Out: what train.py prints and saves; its exit code: 0, 2 for a user's fault, 128 + signal when it was stopped.

    python tools/launch.py --standalone --nproc_per_node=4 train.py config/train_gpt2_medium.py
    python tools/launch.py --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py

torchrun itself ends with a traceback and 1 whatever happened, and kills a process that is still saving after 30 seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

SAVE_SECONDS = 600  # for the last checkpoint after a signal; GPT-2 XL's has 19 GB


def main(argv: list[str] | None = None) -> int:
    """Runs the processes to their end; returns the exit code."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it, less its banner
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # lost connections, with pages of addresses
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    for name in ("elastic", "elastic.agent.server.api", "launcher"):
        logging.getLogger(f"torch.distributed.{name}").setLevel(logging.CRITICAL)  # the processes tell it better
    try:
        run(parse_args(argv))
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            why = " (by the system, if memory ran out)" * (failure.exitcode == -signal.SIGKILL)
            told = f"error: process {rank} was killed by signal {-failure.exitcode}{why}"
            print(f"{told}: --init_from=resume goes on from the last checkpoint", file=sys.stderr)
            return 128 - failure.exitcode
        return failure.exitcode
    except (RendezvousError, DistError) as error:  # no machine there, or one that ended in the middle of the run
        said = str(error).splitlines()[0]
        print(
            f"error: no connection to the other machines ({said}): see what they say, or look at --rdzv_endpoint=",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
