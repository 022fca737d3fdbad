"""Other people's trainers, where a line or two of the user's would not do. Each module needs its framework."""
