"""Flags that several tests train with: families, whose losses are in tests/golden.json, and strings of --block."""

import itertools

LAYERS = (  # every choice of a reader
    "c,p", "c.own_slots", "c.joint_slots,p", "p/2,c,p/2", "c/2+p/2,c/2+p/2", "c,s", "c+s/2;p", "c.gelu,p.sigmoid",
    "c.sigmoid+s.swiglu", "c.stream,p.softmax", "c.none,p.matrix", "s.gelu.none,c.gelu/2", "c,e.relu2/2+p/2",
)  # fmt: skip

# Name -> flags. {m} reads an encoder's memory. {alibi} is learned positions in encoders, which have no ALiBi.
BLOCKS = {
    "standard": "--bias=True",
    "parallel": "--block=parallel --pos=rope --mlp=swiglu --norm=rmsnorm",
    "simplified": "--block=simplified --pos={alibi} --sas_value_proj=all",
    "simplified_parallel": "--block=simplified_parallel --attention=gqa --n_kv_head=2",
    "superblock": "--block=c{m}+p --qk_norm=True --window=7",
    "superblock, series": "--block=c,p --norm_placement=sandwich --mlp=geglu",
    "superblock, joint pool": "--block=c.joint_slots{m} --pos={alibi}",
}
OBJECTIVES = {
    "causal": "",
    "masked": "--objective=masked --doc_mask=True",
    "seq2seq": "--objective=seq2seq --corrupt_ratio=0.3 --span_length=1.5",
}
OPTIMIZERS = {"adamw": "", "muon": "--optimizer=muon --muon_lr=0.004 --schedule=wsd"}
FAMILIES = {
    f"{block}; {objective}; {optimizer}": f"{BLOCKS[block]} {OBJECTIVES[objective]} {OPTIMIZERS[optimizer]}".format(
        m="+m" if objective == "seq2seq" else "",
        alibi="alibi" if objective == "causal" else "learned",
    ).split()
    for block, objective, optimizer in itertools.product(BLOCKS, OBJECTIVES, OPTIMIZERS)
}
