# Llama 3's 70B network (arXiv:2407.21783): 70.6 B parameters, 15 T tokens, with its peak learning rate. Not run here.
# The last line here prints its plan for 1024 H100. The data set is your own, with 128,256 token ids:
# python data/text/prepare.py --input='web/*.parquet' --tokenizer=bpe:128256 --out=data/web_128k
# python train.py config/llama_70b.py --plan=True --world_size=1024
out_dir = "out/llama_70b"
dataset = "web_128k"

n_layer = 80
n_head = 64
n_embd = 8192
block_size = 8192
vocab_size = 128256
attention = "gqa"
n_kv_head = 8
norm = "rmsnorm"
pos = "rope"
rope_theta = 500000.0
mlp = "swiglu"
mlp_ratio = 28672 / 8192 * 1.5  # 28,672 hidden units: a gated kind takes 2/3
tie_weights = False

batch_size = 2
gradient_accumulation_steps = 512  # 1024 sequences, 8,388,608 tokens a step
parallel = "fsdp"
tp = 4
activation_checkpoint = "selective"

max_iters = 1788000
learning_rate = 1.5e-4
min_lr = 1.5e-6
warmup_iters = 8000
weight_decay = 0.1

eval_interval = 1000
eval_iters = 100
log_interval = 10
