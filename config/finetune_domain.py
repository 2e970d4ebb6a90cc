# Plain continued training: a trained model reads the texts of a domain.
#
# The data are prepared with the tokenizer of the model: gpt2, or the tokenizer.json that lies beside its data. For
# GPT-2's own weights: --init_from=gpt2. Keep to a few epochs, and to a learning rate well below the model's own.
#
# Hardware   what the model was trained on
# Time       1,000 steps of 32,768 tokens: an hour for GPT-2 small on one GPU of 24 GB
#
#   ./prepare_data.sh --dataset=domain_texts --input=my_texts/ --tokenizer=gpt2
#   ./start_train.sh config/finetune_domain.py
#   ./generate_text.sh --out_dir=out/finetune_domain --start="..."

out_dir = "out/finetune_domain"
dataset = "domain_texts"
init_from = "out/my_own_llm.pt"

dropout = 0.1
batch_size = 8
gradient_accumulation_steps = 4
max_iters = 1000
learning_rate = 1e-4
warmup_iters = 100

eval_interval = 50
patience = 3
