"""A step as one kernel of a device: lanes share each unit, groups of lanes the rows."""
