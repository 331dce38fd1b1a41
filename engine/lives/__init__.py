"""Where the time of every request went: kept from the scheduler's decisions."""
