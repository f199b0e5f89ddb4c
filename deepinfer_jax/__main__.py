"""`python -m deepinfer_jax`: the same program as `deepinfer`."""

from deepinfer_jax.entrypoints.cli import main

if __name__ == "__main__":
    main()
