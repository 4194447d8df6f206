"""Element types by name: what a parameter is stored, moved and computed in.

NumPy has no bfloat16, so the 16-bit types are carried as the bits of a uint16; a name says which they are.
"""

import numpy as np

float32, float64, bfloat16, float16 = "float32", "float64", "bfloat16", "float16"
LOW = (bfloat16, float16)


def storage(name: str) -> np.dtype:
    """The NumPy dtype that holds elements of type `name`: uint16 for the 16-bit types."""
    return np.dtype(np.uint16) if name in LOW else np.dtype(name)


def check(argument: str, name: str) -> str:
    """`name` itself. Raises ValueError, naming the argument, for a type that is not known."""
    if name not in (float32, float64, *LOW):
        raise ValueError(
            f"{argument}: unknown dtype {name!r}; known: 'float32', 'float64', 'bfloat16', 'float16'"
        )
    return name
