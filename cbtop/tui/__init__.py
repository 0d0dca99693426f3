"""The terminal screen: the Textual app, its views, and their widgets."""
