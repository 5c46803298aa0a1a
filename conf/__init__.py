"""The configuration of the program: one folder for each choice a user makes."""
