"""Whole weights in and out of a sharded model: state dicts in memory, safetensors files on disk.

What is saved are the weights under their full names, at no world size in particular: they load at any. The
optimizer's state is not saved yet.
"""

from shardrt.checkpoint.files import load, save
from shardrt.checkpoint.state import full_state_dict

__all__ = ["full_state_dict", "load", "save"]
