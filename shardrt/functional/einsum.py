"""Einstein's sums, as a sequence of matmuls of two operands."""

from math import prod
from string import ascii_letters
from typing import Any

from shardrt.functional._arrays import tensor
from shardrt.functional._types import Tensor
from shardrt.functional.matmul import matmul
from shardrt.functional.reduce import sum
from shardrt.functional.shape import permute, reshape


def einsum(formula: str, *operands: Any) -> "Tensor":
    """As in PyTorch and NumPy: "bhqd,bhkd->bhqk".

    One operand after the other, from the left.

    A letter twice in one operand (a diagonal) is not supported.

    Raises:
        ValueError: for a formula that does not fit the operands.
        TypeError: as `matmul`.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> a, b = Tensor([[1.0, 2.0]]), Tensor([[3.0], [4.0]])
        >>> F.einsum("ij,jk->ik", a, b).numpy()
        array([[11.]], dtype=float32)
    """
    tensors = [tensor(x) for x in operands]
    inputs, output = _parsed(formula, tensors)
    sizes: dict[str, int] = {}
    for letters, x in zip(inputs, tensors, strict=True):
        for letter, size in zip(letters, x.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"einsum: index {letter!r} of {formula!r} has size {sizes[letter]} in one operand and "
                    f"{size} in another"
                )
    letters, x = inputs[0], tensors[0]
    for position in range(1, len(tensors)):
        needed = output + "".join(inputs[position + 1 :])
        letters, x = _pair(letters, x, inputs[position], tensors[position], needed, sizes)
    letters, x = _summed(letters, x, output)
    return permute(x, [letters.index(letter) for letter in output])


def _parsed(formula: str, tensors: list["Tensor"]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, "..." replaced by letters."""
    left, arrow, output = formula.replace(" ", "").partition("->")
    inputs = left.split(",")
    if len(inputs) != len(tensors):
        raise ValueError(f"einsum: {formula!r} names {len(inputs)} operand(s), got {len(tensors)}")
    free = "".join(letter for letter in ascii_letters if letter not in formula)  # for the axes of "..."
    hidden = 0
    for position, (letters, x) in enumerate(zip(inputs, tensors, strict=True)):
        count = x.ndim - len(letters.replace("...", ""))
        if count < 0 or (count > 0 and "..." not in letters):
            raise ValueError(
                f"einsum: {letters!r} of {formula!r} must name all {x.ndim} dimensions of shape {x.shape}"
            )
        inputs[position] = letters.replace("...", free[len(free) - count :])
        hidden = max(hidden, count)
    everything = "".join(inputs)
    spare = free[len(free) - hidden :]
    if not arrow:  # as NumPy: the letters that occur once, in the order of the alphabet
        once = sorted(letter for letter in set(everything) - set(spare) if everything.count(letter) == 1)
        output = "..." * ("..." in left) + "".join(once)
    output = output.replace("...", spare)
    for letters in (*inputs, output):
        if len(set(letters)) < len(letters):
            raise ValueError(
                f"einsum: {formula!r} repeats a letter within an operand or the result, which is not "
                "supported"
            )
    if not all(letter.isalpha() for letter in everything + output) or set(output) - set(everything):
        raise ValueError(
            f"einsum: {formula!r} must be a formula such as 'ij,jk->ik', whose result letters are in the "
            "operands"
        )
    return inputs, output


def _pair(a: str, x: "Tensor", b: str, y: "Tensor", needed: str, sizes: dict[str, int]) -> tuple:
    """(letters, tensor) of two operands multiplied, summed over letters that no later operand needs."""
    a, x = _summed(a, x, b + needed)
    b, y = _summed(b, y, a + needed)
    both = [letter for letter in a if letter in b]
    batch = "".join(letter for letter in both if letter in needed)
    inner = "".join(letter for letter in both if letter not in needed)
    rows = "".join(letter for letter in a if letter not in b)
    columns = "".join(letter for letter in b if letter not in a)

    def matrix(letters: str, z: "Tensor", first: str, second: str) -> "Tensor":
        z = permute(z, [letters.index(letter) for letter in batch + first + second])
        return reshape(z, [prod(sizes[letter] for letter in part) for part in (batch, first, second)])

    z = matmul(matrix(a, x, rows, inner), matrix(b, y, inner, columns))
    return batch + rows + columns, reshape(z, [sizes[letter] for letter in batch + rows + columns])


def _summed(letters: str, x: "Tensor", needed: str) -> tuple[str, "Tensor"]:
    """Without the axes whose letters are not needed."""
    axes = [i for i, letter in enumerate(letters) if letter not in needed]
    kept = "".join(letter for letter in letters if letter in needed)
    return kept, sum(x, axes) if axes else x
