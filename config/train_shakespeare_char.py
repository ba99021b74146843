# The character-level Shakespeare model of nanoGPT for one GPU: 10.7 M parameters. nanoGPT reports a best validation
# loss of 1.4697 after 3 minutes on an A100; not yet measured here.
# python data/shakespeare_char/prepare.py && python train.py config/train_shakespeare_char.py
out_dir = "out/shakespeare_char"
dataset = "shakespeare_char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.2
batch_size = 64
gradient_accumulation_steps = 1

max_iters = 5000
learning_rate = 1e-3
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100

eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
