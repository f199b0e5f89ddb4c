"""Training of the shipped model and of drafters; nothing else imports this room."""
