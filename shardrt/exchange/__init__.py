"""`shardrt ckpt convert`: checkpoints of other programs, in and out, without those programs.

Read in this order: checkpoint, output, names, convert, then a format in formats/.
"""
