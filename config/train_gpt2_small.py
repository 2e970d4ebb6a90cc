# GPT-2 small (124 M parameters) on WikiText-103: a third of the work of Medium for most of the quality.
#
# Hardware   one CUDA GPU with 12 GB (--batch_size=4 --gradient_accumulation_steps=32 where that is too tight)
# Time       1.0e18 FLOP: 4 hours on an RTX 4090, 9 on a 3090, 2 on an A100, at 45 % of their bf16 peak
#
#   ./prepare_data.sh --val_fraction=0
#   ./start_train.sh config/train_gpt2_small.py
#   ./generate_text.sh --out_dir=out/gpt2_small

out_dir = "out/gpt2_small"
dataset = "wikitext103"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
dropout = 0.1

batch_size = 8
gradient_accumulation_steps = 16  # 131,072 tokens a step
max_iters = 9000  # 10 epochs of 118 million tokens
learning_rate = 6e-4
warmup_iters = 700

eval_interval = 200
