"""The subcommands of `attn-reg`."""
