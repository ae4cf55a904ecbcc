"""The live side without I/O at its heart: ledger, core, endings, recovery, and the controller's loop around them."""
