"""Settings of a model tried beside each other: measured in turns, compared, and the better one kept."""
