from deepinfer_jax.model.flops import active_parameters, skipped_flops
from deepinfer_jax.settings import load


def test_the_published_model_meets_sixteen_billion_weights_and_eight_where_the_decoder_rests():
    config = load("v41_flash").model_config()
    whole, short = active_parameters(config)
    # The model specification gives 16.13 and 7.90 billion.
    assert round(whole / 1e9, 2) == 16.13 and round(short / 1e9, 2) == 7.90
    assert skipped_flops(config, 1000) == 2000 * (whole - short)
