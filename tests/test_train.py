"""train.py: the loop, its files and its faults."""
import train
from conftest import TINY, read_events

def test_loss_starts_at_the_logarithm_of_the_vocabulary_and_falls(tiny):
    assert train.main([*TINY, "--max_iters=20", "--eval_interval=10"]) == 0
    evals = read_events(tiny / "out", "eval")
    print(evals)
    assert [e["iter"] for e in evals] == [0, 10, 20]
