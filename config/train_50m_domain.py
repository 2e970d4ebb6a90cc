# The pilot: 48 M parameters on one's own corpus, before anything larger is paid for.
#
# It shows whether the text is clean, the tokenizer fits and the loss falls as it should. The same data set goes on to
# config/train_125m_domain.py.
#
# Hardware   one CUDA GPU with 8 GB
# Time       3.4e17 FLOP: 1.3 hours on an RTX 4090, 3 on a 3090, 0.7 on an A100, at 45 % of their bf16 peak
#
#   ./prepare_data.sh --dataset=domain --input=my_texts/ --tokenizer=train --vocab_size=32000 --val_fraction=0.05
#   ./start_train.sh config/train_50m_domain.py
#   ./generate_text.sh --out_dir=out/50m_domain --start="..."

out_dir = "out/50m_domain"
dataset = "domain"

n_layer = 10
n_head = 8
n_embd = 512
block_size = 1024
dropout = 0.1

batch_size = 16
gradient_accumulation_steps = 2  # 32,768 tokens a step
max_iters = 30000  # 20 tokens a parameter
learning_rate = 6e-4
warmup_iters = 1000

eval_interval = 500
