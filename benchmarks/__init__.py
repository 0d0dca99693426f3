"""What cbtop itself costs, each figure as a ratio to a peer or a limit measured in the same run."""
