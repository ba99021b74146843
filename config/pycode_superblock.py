# train_pycode.py with superblocks, 2 to 3 minutes on 2 cores: heads and MLP share one norm and one residual sum.
# Validation loss 1.272 and 1.273 nats per byte with --seed=1 and 2 on the whole set, as with --block=parallel, which
# computes the same (measured 2026-11-22, one thread, Python 3.11.7's library).
dataset = "pycode"
out_dir = "out/pycode_superblock"

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1
block = "superblock"
norm = "rmsnorm"
qk_norm = True
pos = "rope"
mlp = "relu2"

optimizer = "muon"
max_iters = 450
learning_rate = 3e-3
min_lr = 0.0
schedule = "wsd"
warmup_iters = 20
cooldown_iters = 150

eval_interval = 150
eval_iters = 60
log_interval = 10
