"""What belongs to one paper and does not fit into its script; scripts import it through common."""
