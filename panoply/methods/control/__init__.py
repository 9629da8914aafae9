"""Learning to control: objectives, sampling and steps beyond the base methods."""
