"""Where the time of one call goes."""
