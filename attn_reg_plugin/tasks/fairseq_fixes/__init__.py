"""Repairs of fairseq itself; importing the plugin's tasks puts them in place."""

from attn_reg_plugin.tasks.fairseq_fixes import log as _log
from attn_reg_plugin.tasks.fairseq_fixes import numpy_two as _numpy_two
from attn_reg_plugin.tasks.fairseq_fixes import processes_on_cpu as _processes_on_cpu

del _log, _numpy_two, _processes_on_cpu
