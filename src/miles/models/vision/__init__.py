"""Vision towers of vision-language models: specs, modules, rope positions of images, and inputs of the decoder."""
