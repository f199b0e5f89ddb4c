"""From logits to tokens: the stable draw, the original engine's draw, and their random words."""
