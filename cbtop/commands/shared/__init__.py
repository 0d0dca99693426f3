"""Code shared by subcommands; not a subcommand itself."""
