"""The numeric policy, and checks of regions and of whole models against float64."""
