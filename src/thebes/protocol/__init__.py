"""What both ends of the line agree on: the contract, messages and seals, leases, the folders of an instance."""
