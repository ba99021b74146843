# pycode_standard.py with superblocks of one pool, 2 to 3 minutes on 2 cores: learned slots, which the heads read in a
# softmax of their own, replace the MLP, with as many parameters.
# Validation loss 1.313 nats per byte (docs/baselines.md). docs/superblock.md says what else was tried.
dataset = "pycode"
out_dir = "out/pycode_superblock_joint"

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1
block = "c.own_slots"
norm = "rmsnorm"
qk_norm = True
pos = "rope"

optimizer = "muon"
max_iters = 450
muon_lr = 0.01
learning_rate = 0.012
min_lr = 0.0
schedule = "wsd"
warmup_iters = 20
cooldown_iters = 150

eval_interval = 150
eval_iters = 60
log_interval = 10
compile = True
