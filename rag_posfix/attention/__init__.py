"""Attention kernels: positions, masks, rotations, softmax. Pure tensor functions on torch alone.

Letters used in shapes throughout the project:
    B rows of a batch · Hq query heads · Hkv key/value heads · Tq query tokens · Tk key tokens · T tokens of a prompt
    D head dimension · N passages · R rows of a plan · V vocabulary
"""
