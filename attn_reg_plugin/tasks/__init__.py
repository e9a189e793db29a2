"""fairseq tasks of the plugin; fairseq imports the files of this folder when it is given as --user-dir."""

from attn_reg_plugin import criterions as _criterions  # fairseq imports no criterions of a user dir by itself
from attn_reg_plugin.tasks import numpy_two as _numpy_two  # what numpy 2 broke in fairseq
from attn_reg_plugin.tasks import processes_on_cpu as _processes_on_cpu

del _criterions, _numpy_two, _processes_on_cpu
