"""Code that several subcommands share. It is not a subcommand itself."""
