# From a base model to one that answers: fine-tuning on questions and answers.
#
# 10,000 to 100,000 pairs are the usual size, as rows {"question", "answer"} (or prompt/completion, instruction/input/
# output, messages) of a JSONL file. Only the answers count in the loss. The tokenizer is the base model's: gpt2, or the
# tokenizer.json that lies beside its data. Set max_iters to about 3 epochs: start_train.sh tells how many one step reads;
# the run stops by itself when the loss on held-out pairs does not improve.
#
# Hardware   what the base model was trained on, or less
# Time       30,000 pairs of 150 tokens, 3 epochs: 400 steps of 32,768 tokens, some minutes for GPT-2 small on one GPU
#
#   ./prepare_data.sh --dataset=chat --chat=true --input=questions.jsonl --tokenizer=gpt2
#   ./start_train.sh config/finetune_chat.py
#   ./generate_text.sh --out_dir=out/chat --chat=true

out_dir = "out/chat"
dataset = "chat"
init_from = "out/my_own_llm.pt"
compile = False  # rows are as long as their conversations: a graph for each length would take longer than the run

dropout = 0.1
batch_size = 8  # × the context of the base model: the ids of a micro-batch, in rows of like length
gradient_accumulation_steps = 4
max_iters = 400
learning_rate = 5e-5  # a tenth of the base model's, so that it does not forget; --learning_rate=1e-3 for a tiny one
warmup_iters = 40
weight_decay = 0.01

eval_interval = 40
patience = 3
