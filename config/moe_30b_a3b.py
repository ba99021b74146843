# Qwen3-30B-A3B's sizes (arXiv:2505.09388): 128 experts, of which a token reads 8, so 3.3 of 30.5 billion parameters.
# On 64 GPUs: python train.py config/moe_30b_a3b.py --plan=True --world_size=64
# Data: python data/text/prepare.py --input=hf:HuggingFaceFW/fineweb-edu:sample-10BT --out=fineweb_edu
dataset = "fineweb_edu"
out_dir = "out/moe_30b_a3b"

n_layer = 48
n_embd = 2048
n_head = 32
head_dim = 128
attention = "gqa"
n_kv_head = 4
qk_norm = True
block_size = 4096
vocab_size = 151936
pos = "rope"
rope_theta = 1000000.0
norm = "rmsnorm"
norm_eps = 1e-6
tie_weights = False
mlp = "swiglu"
n_expert = 128
n_expert_active = 8
expert_ratio = 0.5625  # 768 hidden units

parallel = "fsdp"
activation_checkpoint = "selective"
batch_size = 8
gradient_accumulation_steps = 64

learning_rate = 3e-4
min_lr = 3e-5
max_iters = 100000
warmup_iters = 2000
