"""Quantisation: how many bits a unit's parameters and gradients have between hosts."""

from dataclasses import dataclass

from shardrt.comm.ranks import Mesh
from shardrt.kernels import packed

__all__ = ["Quantisation"]

BLOCKS = {8: 256, 4: 32}  # bits -> numbers in a block


@dataclass(frozen=True)
class Quantisation:
    """Gathers in 8 or 4 bits and reductions in 8, by blocks, for units that are sharded over several hosts.

    Between ranks of one host, which share memory, gradients are not quantised by default: it takes longer
    than it saves. Every rank gets the same rounded parameters. Shards and optimizer state stay float32.
    (Wang et al., ZeRO++, 2023.)

    With HYBRID_SHARD and a copy of all shards on each host, reduce_bits quantises the sums over the copies,
    which are rounded twice. Gradients that are partial sums along another axis stay in reduce_dtype.

    Args:
        gather_bits: 8 or 4 bits of a gathered parameter; None: param_dtype.
        reduce_bits: 8 bits of a gradient that is sent; None: reduce_dtype. Ranks of a host add up their
            gradients first, then hosts exchange quantised sums. Sums are float32.
        block: numbers that share a scale of 4 bytes, a multiple of 32; None: 256 with 8 bits, 32 with 4.
        host_size: number of adjacent ranks that make a host; None: as many as the launcher started on one.
        secondary: (hpZ) the ranks of each host keep the gathered bits of the unit together, so gathers cross
            hosts once after each optimizer step, not once in forward and once in backward.
        within_hosts: the ranks of a host exchange 8 bits, too, instead of float32 or 16 bits; for GPUs whose
            link to each other is slow.
        error_feedback: each rank keeps the error of what it sends between hosts, and adds it to the next
            gradient of the same unit. It takes float32 memory of the unit's size over `host_size`. Errors are
            in checkpoints. Where another number of hosts restores them, they begin with zeros.

    Raises:
        ValueError: for other bits or blocks, and for a host_size below 1.

    Example:
        >>> from shardrt.fsdp import MixedPrecisionPolicy
        >>> from shardrt.fsdp.options.quantisation import Quantisation
        >>> policy = MixedPrecisionPolicy(quantised=Quantisation(gather_bits=4, reduce_bits=8))
    """

    gather_bits: int | None = None
    reduce_bits: int | None = None
    block: int | None = None
    host_size: int | None = None
    secondary: bool = False
    within_hosts: bool = False
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if self.gather_bits not in (None, 8, 4):
            raise ValueError(f"Quantisation: gather_bits must be 8, 4 or None, got {self.gather_bits!r}")
        if self.reduce_bits not in (None, 8):
            raise ValueError(f"Quantisation: reduce_bits must be 8 or None, got {self.reduce_bits!r}")
        if self.block is not None and (self.block < 32 or self.block % 32):
            raise ValueError(f"Quantisation: block must be a multiple of 32, got {self.block!r}")
        if self.host_size is not None and self.host_size < 1:
            raise ValueError(f"Quantisation: host_size must be 1 or more, got {self.host_size!r}")
        if self.secondary and self.gather_bits is None:
            raise ValueError("Quantisation: secondary needs gather_bits=8 or 4")
        if self.error_feedback and self.reduce_bits is None:
            raise ValueError("Quantisation: error_feedback needs reduce_bits=8")

    def ranks_per_host(self, mesh: Mesh) -> int:
        """Number of adjacent ranks of `mesh` that make a host."""
        return self.host_size or mesh.world.local_size

    @property
    def gather_form(self) -> tuple[int, int]:
        """(bits, block) of gathered parameters."""
        return self._form(self.gather_bits)

    @property
    def reduce_form(self) -> tuple[int, int]:
        """(bits, block) of gradients that are sent."""
        return self._form(self.reduce_bits)

    def _form(self, bits: int) -> tuple[int, int]:
        return bits, self.block or BLOCKS[bits]

    def gathered_bytes(self, count: int) -> int:
        """Bytes of `count` gathered parameters."""
        return packed.packed_bytes(count, *self.gather_form)

    def reduced_bytes(self, count: int) -> int:
        """Bytes that a rank sends of `count` gradients to another rank."""
        return packed.packed_bytes(count, *self.reduce_form)
