"""What several subcommands share; no subcommand itself."""
