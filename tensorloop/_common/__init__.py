"""What every room may use: pytrees, checks of arguments, the scope of running loops, progress bars."""
