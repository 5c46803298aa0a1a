"""Read a user's table and turn its columns into inputs and labels."""
