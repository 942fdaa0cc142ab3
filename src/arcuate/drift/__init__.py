"""How recordings change from day to day, measured on a prepared store without any labels."""
