# Llama 2's 7B network (arXiv:2307.09288): 6.74 B parameters, 2.0 T tokens, with its learning rates. Not run here;
# --plan estimates 5 weeks on 64 H100, see docs/scaling.md. The data set is your own, with 32,000 token ids:
# python data/text/prepare.py --input='web/*.parquet' --tokenizer=bpe:32000 --out=data/web_32k
# python train.py config/llama_7b.py --plan=True --world_size=64
out_dir = "out/llama_7b"
dataset = "web_32k"

n_layer = 32
n_head = 32
n_embd = 4096
block_size = 4096
vocab_size = 32000
norm = "rmsnorm"
pos = "rope"
mlp = "swiglu"
mlp_ratio = 11008 / 4096 * 1.5  # 11,008 hidden units: a gated kind takes 2/3
tie_weights = False

batch_size = 2
gradient_accumulation_steps = 8 * 64  # 1024 sequences, 4,194,304 tokens a step
parallel = "fsdp"
activation_checkpoint = "selective"

max_iters = 477000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 2000
weight_decay = 0.1

eval_interval = 1000
eval_iters = 100
log_interval = 10
