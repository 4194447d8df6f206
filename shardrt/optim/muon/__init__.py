"""Muon: hidden matrices by orthogonal updates, sharded; AdamW for all other parameters of one optimizer."""

from shardrt.optim.muon.groups import muon_groups
from shardrt.optim.muon.optimizer import Muon

__all__ = ["Muon", "muon_groups"]
