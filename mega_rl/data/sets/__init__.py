"""What published data sets become: rows of our own, with a count of everything that is left out."""
