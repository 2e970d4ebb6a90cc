# GPT-2 Medium (355 M parameters) on WikiText-103: the run that this corpus supports.
#
# The defaults of train.py, 50,000 steps, read WikiText-103's 118 million tokens 55 times; a model of this size knows
# them by heart long before. This run takes 8 epochs, more dropout, and the learning rate of the GPT-3 paper for this
# size (Brown et al. 2020, table 2.1). Watch the validation loss: my_own_llm.pt is always the best model so far.
#
# Hardware   one CUDA GPU with 24 GB; with 12 GB add --gradient_checkpointing=true --batch_size=4
#            --gradient_accumulation_steps=32
# Time       2.3e18 FLOP: 9 hours on an RTX 4090, 20 on a 3090, 5 on an A100, at 45 % of their bf16 peak
#
#   ./prepare_data.sh --val_fraction=0        # all of its training part; its own validation and test parts
#   ./start_train.sh config/train_gpt2_medium.py
#   ./generate_text.sh --out_dir=out/gpt2_medium

out_dir = "out/gpt2_medium"
dataset = "wikitext103"

n_layer = 24
n_head = 16
n_embd = 1024
block_size = 1024
dropout = 0.2

batch_size = 8
gradient_accumulation_steps = 16  # 131,072 tokens a step
max_iters = 7200
learning_rate = 3e-4
warmup_iters = 700

eval_interval = 200
