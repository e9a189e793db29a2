"""How sites are found in a user's model: one backend per framework or model family, imported once its framework is.

fairseq's models, transformers' models (whatever calls the attention interface), and models of PyTorch's own attention
layers. Modules that hold an `AttentionSite` themselves need no backend.

Every file and folder of this folder is looked at once its framework is imported: the one that FRAMEWORKS has for the
first word of its name, else the package of that name. Its `BACKEND` is the class of a backend.
"""

import importlib
import pkgutil
from functools import partial

from attn_reg_plugin.attention.selection import Backend, register_backend

#: first word of a file's or folder's name -> the module that is imported before it is
FRAMEWORKS = {
    "fairseq": "fairseq",
    # transformers loads its parts when they are used: without this one there is no model yet
    "huggingface": "transformers.modeling_utils",
    "pytorch": "torch",
}


def backend_in(file: str) -> Backend:
    """The backend that a file or folder of this folder has."""
    return importlib.import_module(f"{__name__}.{file}").BACKEND()


for _file in pkgutil.iter_modules(__path__):
    _framework = FRAMEWORKS.get(_file.name.split("_")[0], _file.name)
    register_backend(_framework, partial(backend_in, _file.name))
