"""What adaptive control reaches, what each part of it is worth, and what guessers cost and find."""
