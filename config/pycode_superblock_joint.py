# train_pycode.py with superblocks of one pool, 2 to 3 minutes on 2 cores: learned slots, which the heads read in a
# softmax of their own, replace the MLP, with as many parameters. With --max_iters=150 --warmup_iters=6
# --cooldown_iters=50 --seed=1, validation loss 1.757 nats per byte on 60 batches; 1.844 with --slot_softmax=joint,
# and 1.733 with --n_slot=1: so early, the slots do not help yet.
# After 450 steps, --slot_softmax=joint (arXiv:1907.01470) gives 1.420 and 1.403 with --seed=1 and 2 on the whole set
# (all measured 2026-11-22, one thread, Python 3.11.7's library).
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
