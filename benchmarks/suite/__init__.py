"""How fast is Offbeat, beside the limits of its engines and beside others? One command, one table: `make bench`."""
