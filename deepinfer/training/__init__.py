"""How the small model `mini` comes to be: one file for each stage, in the order they run.

corpus      collect the Python sources that are already installed, split off the held-out part, write the manifest
tokenizer   learn the byte-level BPE, write it in the published layout, turn both parts of the corpus into ids
mini_config the sizes of the model
pretrain    train the backbone on the ids, and finish it under the FP8/FP4 roundings, so that the export loses little
distill     train the draft blocks on the frozen backbone
export      write the checkpoint in the published tensor names and formats
evaluate    score held-out modules: bits per byte, ablations, expert loads, accepted drafts

`held_out.json` names what no stage may train on; `NOTICES.md` names the sources and their licences.
Each stage is a command, `python -m deepinfer.training.<stage> --help`, and skips what is already there.
"""
