"""The Hydra configs, as a package so that an installed wheel finds them."""
