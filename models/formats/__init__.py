"""Names and settings of models in the files of Hugging Face, in and out: one Format for each kind.

A parameter is one tensor there, or several, one after the other; models/hub.py reads and writes them.
"""

from .dense import LLAMA, MISTRAL, QWEN2, QWEN3
from .experts import MIXTRAL, OLMOE, QWEN3_MOE
from .form import Format, Stored
from .gpt2 import GPT2
from .vit import VIT

__all__ = ["FORMATS", "Format", "Stored"]

# Of formats that can describe a model which is from no files, the first is taken.
FORMATS = {form.kind: form for form in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, OLMOE, VIT)}
