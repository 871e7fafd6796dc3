"""Train, distil, measure and export the demo pair. `python -m models.train --help` lists the steps in order.

corpus          which files are read, and which are never trained on
tokenizer       byte-level BPE, 4096 entries
architecture    the two Llama shapes
stream          documents as one tensor of tokens, cut into windows
schedule        learning rate and window length as functions of the time spent
objectives      next-token loss, and distillation from the target
checkpoints     saves and resumes a run
loop            the training loop, limited by time
sampling        batched generation
acceptance      how often a draft's token is accepted
evaluation      losses and acceptance on held-out files
export          checkpoints to model folders
card            figures to models/README.md
conversations   a chat model with itself, to train a head on; it has a command of its own
"""
