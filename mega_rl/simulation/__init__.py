"""A cluster that is only pretended: engines and a trainer with given speeds, under the steward that real ones have."""
