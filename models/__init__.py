"""Models written with shardrt, each a file that reads top to bottom.

In a checkout the package is `models`, where shardrt is installed from a wheel it is `shardrt.models`.
"""

import sys

import shardrt  # noqa: F401  before NumPy: it sets the threads of BLAS

_OTHER = "shardrt.models" if __name__ == "models" else "models"
# Under both names each class would be there twice, alike but not equal.
if getattr(sys.modules.get(_OTHER), "__doc__", None) == __doc__:
    raise ImportError(f"{__name__} and {_OTHER} are the same files: import them under one of the two names")
