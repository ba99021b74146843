# Llama's network (arXiv:2302.13971, grouped heads as in arXiv:2307.09288) with pycode_standard.py's optimizer, 2 to 3
# minutes on 2 cores: RoPE, RMSNorm, SwiGLU, two query heads per key, embedding and head not tied.
# Validation loss 1.248 nats per byte (docs/baselines.md).
dataset = "pycode"
out_dir = "out/pycode_llama"

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1
attention = "gqa"
n_kv_head = 2
norm = "rmsnorm"
pos = "rope"
mlp = "swiglu"
tie_weights = False

optimizer = "muon"
max_iters = 450
muon_lr = 0.01
learning_rate = 0.048
min_lr = 0.0
schedule = "wsd"
warmup_iters = 20
cooldown_iters = 150

eval_interval = 150
eval_iters = 60
log_interval = 10
compile = True
