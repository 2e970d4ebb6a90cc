# A model of 110 M parameters for a corpus of one's own, with a vocabulary of one's own.
#
# For a domain corpus of 0.5 to 5 billion tokens (2 to 20 GB of text). The vocabulary of 32,000 comes with the data.
# max_iters below is 20 tokens a parameter (Hoffmann et al. 2022); with a smaller corpus take fewer steps, so that it
# is not read more than about 4 times (Muennighoff et al. 2023): 4 × tokens / 32,768. Run the pilot first:
# config/train_50m_domain.py finds out in an hour whether data and tokenizer are right.
#
# Hardware   one CUDA GPU with 12 GB
# Time       1.9e18 FLOP: 7 hours on an RTX 4090, 17 on a 3090, 4 on an A100, at 45 % of their bf16 peak
#
#   ./prepare_data.sh --dataset=domain --input=my_texts/ --tokenizer=train --vocab_size=32000 --val_fraction=0.05
#   ./start_train.sh config/train_125m_domain.py
#   ./generate_text.sh --out_dir=out/125m_domain --start="..."

out_dir = "out/125m_domain"
dataset = "domain"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
dropout = 0.1

batch_size = 8
gradient_accumulation_steps = 4  # 32,768 tokens a step
max_iters = 76000
learning_rate = 3e-4
warmup_iters = 2000

eval_interval = 500
