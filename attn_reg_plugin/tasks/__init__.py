"""fairseq tasks of the plugin; fairseq imports the files of this folder when it is given as --user-dir."""

from attn_reg_plugin import criterions as _criterions  # fairseq imports no criterions of a user dir by itself
from attn_reg_plugin.tasks import fairseq_fixes as _fairseq_fixes

del _criterions, _fairseq_fixes
