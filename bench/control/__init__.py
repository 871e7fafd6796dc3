"""What adaptive control reaches, and what each part of it is worth."""
