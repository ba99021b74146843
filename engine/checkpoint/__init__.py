"""Starts, saves and resumes runs; writes checkpoints that survive a crash at any instant.

    run.py      what a run saves and restores, and where a new run gets its weights
    saver.py    Checkpoints: what a failed save does to the run; its Saver calls files.save, perhaps in a thread
    files.py    save, find, read, load: step directories, latest and best; imported as `checkpoint`
    pieces.py   rank_N.safetensors and index.json          state.py    state.json
    weights.py  trained weights of any origin              folder.py   the lock and the flags of out_dir
    convert.py  checkpoints of format 3

Saving: train.Run.save -> Checkpoints.save -> Saver.save -> files.save -> pieces.write.
Loading: run.restore -> files.read -> weights.load_tensors -> files.load -> pieces.fill.
"""
