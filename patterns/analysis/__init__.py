"""What is known of values before anything runs: their range, how functions order them, what is linear."""
