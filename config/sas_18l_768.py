# The simplified block SAS in the setting of its paper (arXiv:2311.01906, autoregressive models of code): 18 layers,
# 40,000 steps of 128 sequences of 128 tokens, a learning rate that falls linearly after 5 % of warm-up. Not yet
# measured. The network is that of the authors' code; --block=simplified_parallel is SAS-P, and --block=standard
# --scaled_init=False the Pre-LN baseline, whose values have no bias there. Gains do not decay, neither here nor there.
# The paper trains on codeparrot. The standard library used here is far smaller, so pass --dataset with enough code
# before you compare losses.
# python data/pycode/prepare.py --tokenizer=gpt2 --out=data/pycode_gpt2 && python train.py config/sas_18l_768.py
out_dir = "out/sas_18l_768"
dataset = "pycode_gpt2"

n_layer = 18
n_head = 12
n_embd = 768
block_size = 128
batch_size = 32
gradient_accumulation_steps = 4
block = "simplified"
norm = "rmsnorm_eps_outside"
last_norm = "layernorm"
norm_bias = True
qkv_bias = True
mlp = "relu"

max_iters = 40000
learning_rate = 1e-3
min_lr = 1e-7
beta2 = 0.999
weight_decay = 0.1
schedule = "wsd"
warmup_iters = 2000
cooldown_iters = 38000  # all steps after the warm-up: no constant part

eval_interval = 500
eval_iters = 200
log_interval = 10
