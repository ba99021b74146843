# pycode_standard.py with superblocks, 2 to 3 minutes on 2 cores: heads and MLP share one norm and one residual sum.
# Validation loss 1.260 nats per byte, as with --block=parallel, which computes the same (docs/baselines.md).
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
muon_lr = 0.005
learning_rate = 0.006
min_lr = 0.0
schedule = "wsd"
warmup_iters = 20
cooldown_iters = 150

eval_interval = 150
eval_iters = 60
log_interval = 10
compile = True
