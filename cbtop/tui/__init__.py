"""The screen: the Textual app, its views and the widgets they are made of."""
