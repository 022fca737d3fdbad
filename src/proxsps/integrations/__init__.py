"""Other people's trainers, if one or two lines of your own are not enough. Each module needs its framework."""
