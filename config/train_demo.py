# The demo: a model of 2.2 million parameters on the documentation of Python, for any machine.
#
# Hardware   two CPU cores, 1 GB of memory
# Time       about two minutes
# Result     text in the shape of Python's documentation: signatures, indented descriptions, parameter names
#
#   ./prepare_data.sh --dataset=demo --tokenizer=train --vocab_size=2048
#   ./start_train.sh config/train_demo.py
#   ./generate_text.sh --out_dir=out/demo --start="The module "

out_dir = "out/demo"
dataset = "demo"
device = "auto"
dtype = "float32"
compile = False  # would take half of the two minutes

n_layer = 4
n_head = 4
n_embd = 192
block_size = 128
dropout = 0.0  # one and a half epochs: nothing is read often enough to be learnt by heart

batch_size = 16
gradient_accumulation_steps = 1
max_iters = 500
learning_rate = 3e-3  # small models bear large ones
warmup_iters = 50

eval_interval = 100
eval_iters = 20
checkpoint_interval = 250
