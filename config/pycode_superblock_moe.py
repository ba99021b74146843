# A superblock of experts with one kind of block, 2 to 4 minutes on 2 cores. Each sum has half of the heads, and 4
# experts of 192 hidden units, of which a token reads two: as many units as a sum of the dense twin has, which is
# config/pycode_superblock.py --block=c/2+p/2,c/2+p/2 --muon_lr=0.01. Routers and biases add 0.3 % to its parameters.
dataset = "pycode"
out_dir = "out/pycode_superblock_moe"

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1
block = "c/2+e/2,c/2+e/2"
norm = "rmsnorm"
qk_norm = True
pos = "rope"
mlp = "relu2"
n_expert = 4
n_expert_active = 2
balance_rate = 0.01

optimizer = "muon"
max_iters = 450
muon_lr = 0.01
learning_rate = 0.006
min_lr = 0.0
schedule = "wsd"
warmup_iters = 20
cooldown_iters = 150

eval_interval = 150
eval_iters = 60
log_interval = 10
compile = True
