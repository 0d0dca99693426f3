"""The cost of cbtop itself. Each figure is a ratio to a peer or a limit measured in the same run."""
