"""What a run has left in its folder, read for people: `records` for notebooks, and the page of `offbeat report`."""
