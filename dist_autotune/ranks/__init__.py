"""How the ranks of a group exchange bytes, and how each wait ends; may import no other room."""
