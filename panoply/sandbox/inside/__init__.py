"""What runs within the walls. These files import the standard library alone: no other file of Panoply is there."""
