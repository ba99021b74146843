# The simplified parallel block SAS-P (arXiv:2311.01906) with pycode_standard.py's other settings, 2 to 3 minutes on 2
# cores. Its queries start at zero, so they are not normed. Validation loss 1.412 nats per byte (docs/baselines.md).
dataset = "pycode"
out_dir = "out/pycode_sas_p"

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1
block = "simplified_parallel"
sas_beta_ff = 0.2  # 0.1 at 18 layers; in proportion to 1 / sqrt(depth)
norm = "rmsnorm"
pos = "rope"
mlp = "relu2"

optimizer = "muon"
max_iters = 450
muon_lr = 0.02
learning_rate = 0.006
min_lr = 0.0
schedule = "wsd"
warmup_iters = 20
cooldown_iters = 150

eval_interval = 150
eval_iters = 60
log_interval = 10
compile = True
