# train_pycode.py with superblocks of one pool, 2 to 3 minutes on 2 cores: learned slots, which the heads read in a
# softmax of their own, replace the MLP, with as many parameters.
# With --muon_lr=0.02 --learning_rate=0.012, validation loss 1.346 and 1.350 nats per byte with --seed=1 and 2 on the
# whole set, and 1.409 with --slot_softmax=joint (arXiv:1907.01470; measured 2026-11-22, one thread, bfloat16, Python
# 3.11.7's library). docs/superblock.md says what else was tried.
dataset = "pycode"
out_dir = "out/pycode_superblock_joint"

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1
block = "superblock"
pool = "joint"
norm = "rmsnorm"
qk_norm = True
pos = "rope"

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
