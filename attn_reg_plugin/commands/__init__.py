"""The subcommands of `attn-reg`, one file each."""
