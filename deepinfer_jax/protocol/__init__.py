"""The OpenAI protocol around the engine: request bodies in, response bodies out, batch files."""
