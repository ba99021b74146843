"""Starts, saves and resumes runs; writes checkpoints that survive a crash at any instant.

    run.py      what a run saves and restores, and where a new run gets its weights
    saver.py    Checkpoints: what a failed save does to the run; its Saver calls files.save, perhaps in a thread
    files.py    save, find, read, load: step directories, latest and best; imported as `checkpoint`
    contents.py the files in one step directory
    weights.py  trained weights of any origin              folder.py   the lock and the flags of out_dir

Saving: train.Run.save -> Checkpoints.save -> Saver.save -> files.save -> contents.write.
Loading: run.restore -> files.read -> weights.load_tensors -> files.load -> contents.fill.
"""
