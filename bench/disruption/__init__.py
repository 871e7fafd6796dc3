"""What streams see when processes die, stop or are replaced."""
