"""How bytes and time grow with T: measured, fitted, explained."""
